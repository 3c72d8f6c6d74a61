"""A run goes on from a converted checkpoint: weights only, at step 0, on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, whole

from shardyard.errors import UserError


def resume(folder: Path, checkpoint: Path, out: Path):
    """Step and weights of a run that begins with other weights and resumes from ``checkpoint``."""
    from shardyard.checkpoint import CheckpointStore
    from shardyard.train.differences import RunFacts
    from shardyard.train.resume import restore

    built, step, _ = build_step(folder, Recipe(model={"train_from_scratch": True}))
    store = CheckpointStore(out, save_total_limit=None)
    path = str(store.resolve(str(checkpoint)))
    state, _ = restore(store, path, built, step.optimizer, "an order", RunFacts({}))
    return state, whole(dict(built.model.named_parameters()))


@pytest.mark.parametrize("family", [pytest.param("llama_tied", marks=pytest.mark.soak), "qwen3_moe"])
def test_a_converted_checkpoint_is_resumed_on_two_ranks(ranks, tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM

    from shardyard.convert.job import Conversion, convert

    source = write_tiny_model(tmp_path / "source", family, dtype="bfloat16")
    checkpoint = tmp_path / "converted/global_step_0"
    convert(Conversion(source, checkpoint, "dcp", dtype=torch.float32, shard_bytes=30_000))
    state, weights = ranks.run(2, resume, source, checkpoint, tmp_path / "run")[0]
    assert (state.step, state.cursor, state.data_order) == (0, 0, "an order")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert weights.keys() == wanted.keys()
    assert all(np.array_equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.soak
def test_weights_that_are_not_in_fp32_are_no_checkpoint_to_resume_and_that_is_said(ranks, tmp_path):
    from support.ranks import RankFailure

    from shardyard.convert.job import Conversion, convert

    source = write_tiny_model(tmp_path / "source", "llama_tied", dtype="bfloat16")
    convert(Conversion(source, tmp_path / "dcp", "dcp"))
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, resume, source, tmp_path / "dcp", tmp_path / "run")
    assert isinstance(caught.value.cause, UserError) and "of another shape or dtype" in str(
        caught.value.cause
    )


def test_the_start_of_a_run_converts_through_the_same_function(tmp_path):
    """What a run that names a Megatron-core folder calls: an empty folder becomes a model's."""
    from support.conversions import held_in

    from shardyard.convert.job import Conversion, convert, convert_to_hf

    source = write_tiny_model(tmp_path / "source", "qwen3_moe", vocab_size=200)
    convert(Conversion(source, tmp_path / "mcore", "mcore"))
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "mcore" / name).unlink()
    (tmp_path / "target").mkdir()
    convert_to_hf(tmp_path / "mcore", source, tmp_path / "target")
    assert held_in(tmp_path / "target") == held_in(source)
    assert (tmp_path / "target/generation_config.json").exists()
