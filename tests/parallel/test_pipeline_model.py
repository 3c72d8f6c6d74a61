"""A rank's pipeline stages in place of a whole model: evaluation, seeds, frozen parts, faults, counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import write_tiny_model
from support.pipelines import joined, train_stages
from support.ranks import RankFailure
from support.training import Recipe, build_step, largest_relative_difference, make_rows, micro_batches_of

TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}
TOLERANCE = 1e-5
INTERLEAVED = {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("pipelines") / "tied", "parity_dense")


def evaluate(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Logits of the first micro-batch, loss sums of all, and what training without gradients says."""
    import torch

    from shardyard.evaluate.forwards import forward_parts

    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(make_rows(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    parts = [forward_parts(batch, 1, device=step.device, packed=True)[0] for batch in batches]
    with torch.no_grad():
        sums = [float(built.model(**part)) for part in parts]
        logits = built.model(**(parts[0] | {"labels": None}))
    try:
        built.model(**parts[0])
        said = ""
    except RuntimeError as error:
        said = str(error)
    return {"sums": sums, "logits": logits.numpy(), "said": said}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(INTERLEAVED, id="four stages on two ranks"),
        pytest.param({"pp_size": 2}, id="two stages", marks=pytest.mark.soak),
    ],
)
def test_evaluation_gives_plain_transformers_numbers(ranks, tied, parallel):
    """Loss sums on the rank of the last stage and 0 elsewhere; all logits, of packed rows, on every rank."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    shares = ranks.run(2, evaluate, tied, Recipe(accumulation=4, parallel=parallel))
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    wanted, first = [], []
    rows = make_rows()
    with torch.no_grad():
        for number in range(4):
            total = 0.0
            for ids, labels in rows[4 * number : 4 * number + 4]:
                logits = model(input_ids=torch.tensor([ids])).logits[0]
                total += float(F.cross_entropy(logits, torch.tensor(labels), reduction="sum"))
                first += [logits.numpy()] if number == 0 else []
            wanted.append(total)
    assert shares[0]["sums"] == [0.0] * 4
    assert shares[1]["sums"] == pytest.approx(wanted, rel=TOLERANCE)
    expected = np.concatenate(first)
    for share in shares:
        assert np.abs(share["logits"][0] - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert "forward_backward" in share["said"]


def initial_weights(folder: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    from support.training import whole

    built, _, _ = build_step(folder, recipe)
    return whole(dict(built.model.named_parameters()))


def test_seeded_weights_are_those_of_one_process_bit_for_bit(ranks, tied):
    """The embedding is tied: drawn as such also on the last stage, which has the output layer too."""
    scratch = {"train_from_scratch": True}
    wanted = ranks.run(1, initial_weights, tied, Recipe(model=scratch))[0]
    shares = ranks.run(2, initial_weights, tied, Recipe(model=scratch, parallel=INTERLEAVED))
    assert shares[0].keys() | shares[1].keys() == wanted.keys()
    assert shares[0].keys() & shares[1].keys() == {"model.embed_tokens.weight"}
    for share in shares:
        for name, tensor in share.items():
            np.testing.assert_array_equal(tensor, wanted[name], err_msg=name)


def test_a_frozen_first_stage_leaves_the_others_as_in_one_process(ranks, tmp_path):
    """Nothing to train on the first rank, which then has no gradient to pass on either."""
    folder = write_tiny_model(tmp_path / "untied", "parity_dense", tie_word_embeddings=False)
    frozen = {"freeze": ["model.embed_tokens", "model.layers.{0-1}"]}
    one = ranks.run(1, train_stages, folder, make_rows(), Recipe(model=frozen, training=TRAINING))[0]
    recipe = Recipe(accumulation=2, model=frozen, training=TRAINING, parallel={"pp_size": 2})
    ours = joined(ranks.run(2, train_stages, folder, make_rows(), recipe))
    assert ours.losses == pytest.approx(one.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(one.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, one.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, one.weights) <= TOLERANCE
    assert not any(name.startswith(("model.embed", "model.layers.0.")) for name in ours.first_grads)


def refusal(folder: Path, recipe: Recipe) -> str:
    from shardyard.errors import UserError

    try:
        build_step(folder, recipe)
    except UserError as error:
        return str(error)
    return "built"


def test_a_pattern_that_no_stage_knows_is_refused_on_every_rank(ranks, tied):
    """But one that names another rank's layer is no mistake."""
    recipe = Recipe(model={"freeze": ["model.layers.0", "model.layers.7"]}, parallel={"pp_size": 2})
    assert (
        ranks.run(2, refusal, tied, recipe)
        == ["model.freeze: model.layers.7 matches no parameter of this model"] * 2
    )


def frozen_names(folder: Path, recipe: Recipe) -> set[str]:
    built, _, _ = build_step(folder, recipe)
    return {name for name, parameter in built.model.named_parameters() if not parameter.requires_grad}


def test_a_tied_weight_is_frozen_under_the_name_of_either_end(ranks, tied):
    """The first stage has no output layer, and its embedding is that layer's weight."""
    recipe = Recipe(model={"freeze": ["lm_head"]}, parallel={"pp_size": 2})
    assert ranks.run(2, frozen_names, tied, recipe) == [{"model.embed_tokens.weight"}] * 2


def test_freezing_all_stages_is_refused_and_one_stage_is_not(ranks, tied):
    for patterns, wanted in (
        (["model.layers.{0-3}", "*embed_tokens", "model.norm"], "nothing is left to train"),
        (["model.layers.{0-3}", "*embed_tokens"], "built"),
    ):
        recipe = Recipe(model={"freeze": patterns}, parallel={"pp_size": 2})
        assert all(wanted in said for said in ranks.run(2, refusal, tied, recipe))


def test_a_tensor_missing_in_the_files_is_found_by_the_stage_that_needs_it(ranks, tied, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tied, tmp_path / "incomplete"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailure) as failure:
        ranks.run(2, build_and_stop, folder, Recipe(parallel={"pp_size": 2}), timeout_s=60)
    assert failure.value.rank == 1
    assert "lack 1 tensor(s)" in str(failure.value.cause)
    assert "model.layers.3.mlp.up_proj.weight" in str(failure.value.cause)


def build_and_stop(folder: Path, recipe: Recipe) -> None:
    build_step(folder, recipe)


def several_lengths(folder: Path, recipe: Recipe, seeds: tuple[int, ...]) -> list[float]:
    """Losses of steps whose rows differ in length and, by the last, in the number of micro-batches."""
    built, step, meshes = build_step(folder, recipe)
    del built
    losses = []
    for number, seed in enumerate(seeds, 1):
        count = recipe.accumulation + (number == len(seeds))
        batches = micro_batches_of(make_rows(12, seed=seed), count, meshes.dp_rank, meshes.dp_size)
        losses.append(step(batches, step=number, lr=1e-2).loss)
    return losses


def test_a_step_of_another_length_or_count_runs_on_a_schedule_of_its_own(ranks, tied):
    seeds = (0, 1, 0, 2)
    wanted = ranks.run(1, several_lengths, tied, Recipe(training=TRAINING), seeds)[0]
    recipe = Recipe(accumulation=2, training=TRAINING, parallel={"pp_size": 2})
    for losses in ranks.run(2, several_lengths, tied, recipe, seeds):
        assert losses == pytest.approx(wanted, rel=TOLERANCE)


def spoiled(folder: Path, recipe: Recipe) -> str:
    """The message of a step whose loss is NaN: the last norm's weight is."""
    import torch

    from shardyard.train.step import NonFiniteError

    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(make_rows(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    for name, parameter in built.model.named_parameters():
        if name == "model.norm.weight":
            with torch.no_grad():
                parameter.to_local().fill_(float("nan"))
    try:
        step(batches, step=1, lr=1e-2)
    except NonFiniteError as error:
        return str(error)
    return "went on"


def test_a_loss_that_is_nan_is_told_on_every_rank_with_its_samples(ranks, tied):
    messages = ranks.run(2, spoiled, tied, Recipe(accumulation=2, parallel={"pp_size": 2}))
    assert messages[0] == messages[1]
    assert "step 1: the loss is NaN or Inf on rank 1, micro-batch 1" in messages[0]


def counted(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Forwards of each decoder layer and messages between stages and over fsdp, in one step."""
    from support.traffic import Traffic, axes_of

    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(make_rows(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    calls: dict[str, int] = {}
    for name, module in built.model.named_modules():
        if name.count(".") == 2 and name.startswith("model.layers."):
            module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    with Traffic(axes_of(meshes)) as traffic:
        counts = step._agree(batches)
        step._forward_backward(batches, counts)
    return {"calls": calls, "traffic": traffic.counts()}


def test_each_layer_runs_once_a_micro_batch_and_each_unit_is_reduced_once_a_step(ranks, tmp_path):
    """Units of a stage of an untied model with two layers: two layers, embedding or head, root if it has
    parameters of its own (the last norm). Four micro-batches are four hidden states and four gradients.
    """
    folder = write_tiny_model(tmp_path / "untied", "parity_dense", tie_word_embeddings=False)
    shares = ranks.run(4, counted, folder, Recipe(accumulation=4, parallel={"pp_size": 2}))
    for rank, share in enumerate(shares):
        first = rank < 2
        own = {name: 4 for name in share["calls"] if share["calls"][name]}
        assert share["calls"] == own and len(own) == 4  # foreign layers are called too, and do nothing
        assert share["traffic"]["reduce-scatter", "fsdp"] == (3 if first else 4)
        assert share["traffic"]["send", "pp"] - share["traffic"]["receive", "pp"] == 0
        assert share["traffic"]["send", "pp"] == 4 + 1  # and one vote of torch's, that all shapes are known
