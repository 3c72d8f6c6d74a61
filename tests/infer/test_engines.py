"""Engines: each answers as a plain loop over the model's forward does, alone, together and over ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.inference import answers_in_rank, ask, greedy_by_hand, open_here
from support.models import write_tiny_model

PROMPTS = [[5, 9, 44], [7], [120, 3, 3, 17, 60, 61, 62, 63, 2], [199 - 2, 150, 11, 12]]
COUNT = 9


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "deepseek_v3", "gpt_oss", "mamba2"])
def test_answers_are_those_of_a_plain_loop(ranks, tmp_path, family):
    folder = write_model(tmp_path / family, family)
    expected = greedy_by_hand(folder, PROMPTS, COUNT)
    (told,) = ranks.run(
        1, answers_in_rank, folder, PROMPTS, {"max_new_tokens": COUNT}, init_process_group=False
    )
    kind, _, found = told
    assert found == [(ids, "length") for ids in expected]
    assert kind == ("BatchEngine" if family in ("deepseek_v3", "mamba2") else "ContinuousEngine")


def write_model(folder: Path, family: str) -> Path:
    from support.tokenizers import CHATML, byte_tokenizer

    byte_tokenizer(CHATML).save_pretrained(folder)
    if family not in ("mamba", "mamba2"):
        return write_tiny_model(folder, family)
    import torch
    from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig

    torch.manual_seed(0)
    if family == "mamba":
        first = MambaConfig(vocab_size=199, hidden_size=16, num_hidden_layers=2, state_size=4)
        AutoModelForCausalLM.from_config(first).save_pretrained(folder)
        return folder
    config = Mamba2Config(
        vocab_size=199, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=4,
        n_groups=1, chunk_size=4, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "size"), [("opt", 1), ("mpt", 1), ("gpt2", 2)])
def test_a_long_answer_beside_a_long_prompt_does_not_pass_the_context(ranks, tmp_path, family, size):
    folder = write_with_context_of_32(tmp_path / family, family)
    prompts = [[place % 40 + 3 for place in range(29)], [5, 6], [8] * 15, [9]]
    rooms = [32 - len(prompt) for prompt in prompts]
    expected = [greedy_by_hand(folder, [prompts[row]], rooms[row])[0] for row in range(4)]
    told = ranks.run(
        size, answers_in_rank, folder, prompts, {"max_new_tokens": 500}, init_process_group=False
    )
    kind, _, found = told[0]
    assert kind == "BatchEngine"
    assert found == [(ids, "length") for ids in expected]


def write_with_context_of_32(folder: Path, family: str) -> Path:
    """A model that fails beyond its context, where those of rotary positions go on."""
    import torch
    from support.tokenizers import CHATML, byte_tokenizer
    from transformers import AutoModelForCausalLM, GPT2Config, MptConfig, OPTConfig

    tokenizer = byte_tokenizer(CHATML)
    size: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = {
        "opt": lambda: OPTConfig(**size, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32),
        "mpt": lambda: MptConfig(**size, max_seq_len=32),
        "gpt2": lambda: GPT2Config(**size, n_positions=32),
    }[family]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # nearly equal scores would be told apart by rounding
        for parameter in model.parameters():
            parameter *= 10 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_cache_of_a_model_without_attention_is_of_some_size(ranks, tmp_path):
    folder = write_model(tmp_path / "m", "mamba")
    expected = greedy_by_hand(folder, PROMPTS, 3)
    (found,) = ranks.run(1, by_default_in_rank, folder, 3, init_process_group=False)
    assert found == ("BatchEngine", expected)


def by_default_in_rank(folder: Path, count: int) -> Any:
    from shardyard.infer.engines import with_engine
    from shardyard.infer.types import Request, Sampling

    def work(engine: Any) -> Any:
        told = ask(engine, [Request(tuple(prompt), Sampling(max_new_tokens=count)) for prompt in PROMPTS])
        return type(engine).__name__, [[token.id for token in tokens] for tokens, _ in told]

    return with_engine(open_here(folder), work)


@pytest.mark.parametrize("form", ["hf", "dcp", "mcore"])
@pytest.mark.parametrize("parallel", ["tp", "fsdp"])
def test_two_ranks_answer_as_one_from_every_form_of_folder(ranks, tmp_path, parallel, form, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "hf", "parity_dense")
    expected = greedy_by_hand(folder, PROMPTS, COUNT)
    source = in_form(folder, tmp_path / form, form)
    told = ranks.run(
        2, answers_in_rank, source, PROMPTS, {"max_new_tokens": COUNT}, parallel=parallel,
        init_process_group=False,
    )  # fmt: skip
    assert told[1] is None
    kind, shared, found = told[0]
    assert (kind, shared) == ("ContinuousEngine" if parallel == "tp" else "BatchEngine", parallel)
    assert found == [(ids, "length") for ids in expected]


def in_form(folder: Path, target: Path, form: str) -> Path:
    """The same weights as a folder of ``form``."""
    if form == "hf":
        return folder
    from shardyard.convert.job import Conversion, convert

    convert(Conversion(folder, target, form))  # type: ignore[arg-type]
    return target


def test_a_stop_token_ends_the_answer_and_is_its_last_token(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    plain = greedy_by_hand(folder, PROMPTS, COUNT)
    stops = {ids[4] for ids in plain}
    expected = greedy_by_hand(folder, PROMPTS, COUNT, stop=sorted(stops))
    (told,) = ranks.run(
        1, answers_in_rank, folder, PROMPTS,
        {"max_new_tokens": COUNT, "stop_ids": frozenset(stops)}, init_process_group=False,
    )  # fmt: skip
    assert told[2] == [(ids, "stop") for ids in expected]


def test_requests_that_cannot_be_answered_are_refused_and_long_answers_bounded(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3", max_position_embeddings=16)
    for engine in ("continuous", "batches"):
        ranks.run(1, refusals_in_rank, folder, engine, init_process_group=False)


def refusals_in_rank(folder: Path, kind: str) -> None:
    from shardyard.infer.types import Request, Sampling

    engine = make(open_here(folder), kind)
    refused = {
        "empty": Request(()),
        "context of 16": Request(tuple(range(16))),
        "token id 199": Request((3, 199)),
        "token id -1": Request((3, -1)),
        "token id 500": Request((3,), Sampling(logit_bias={500: 1.0})),
    }
    for word, request in refused.items():
        with pytest.raises(ValueError, match=word):
            engine.submit(request, print)
    ((tokens, end),) = ask(engine, [Request(tuple(range(10)), Sampling(max_new_tokens=500))])
    assert (len(tokens), end.reason) == (6, "length")
    assert engine.load() == type(engine.load())(running=0, waiting=0, prompt_tokens=10, new_tokens=6)
    engine.close()
    with pytest.raises(RuntimeError, match="stopped"):
        engine.submit(Request((3,)), print)


def make(opened: Any, kind: str, max_running: int = 4) -> Any:
    from shardyard.infer.engines.batches import BatchEngine
    from shardyard.infer.engines.continuous import ContinuousEngine, Room

    if kind == "batches":
        return BatchEngine(
            opened.model, context_length=opened.context_length, max_running=max_running, padded=True
        )
    return ContinuousEngine(opened.model, Room(opened.context_length, max_running, 512, 64))


@pytest.mark.parametrize("kind", ["continuous", "batches"])
def test_a_cancelled_request_ends_at_once_and_leaves_the_others_alone(ranks, tmp_path, kind):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    expected = greedy_by_hand(folder, PROMPTS[:1], 40)
    (found,) = ranks.run(1, cancel_in_rank, folder, kind, init_process_group=False)
    assert found == expected[0]


def cancel_in_rank(folder: Path, kind: str) -> list[int]:
    from shardyard.infer.types import Finished, Request, Sampling

    engine = make(open_here(folder), kind)
    begun, ends, seen = threading.Event(), [], []

    def deliver(event: Any) -> None:
        seen.append(event)
        begun.set()
        if isinstance(event, Finished):
            ends.append(event.reason)

    name = engine.submit(Request(tuple(PROMPTS[1]), Sampling(max_new_tokens=400)), deliver)
    assert begun.wait(60)
    engine.cancel(name)
    engine.cancel(name)
    assert ends == ["cancelled"]
    counted = len(seen)
    ((tokens, end),) = ask(engine, [Request(tuple(PROMPTS[0]), Sampling(max_new_tokens=40))])
    assert end.reason == "length" and len(seen) == counted
    assert engine.load().running == 0
    engine.close()
    return [token.id for token in tokens]


@pytest.mark.parametrize("kind", ["continuous", "batches"])
def test_more_requests_than_may_run_are_all_answered(ranks, tmp_path, kind):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    prompts = [[number, 5, 7 * number % 199] for number in range(1, 12)]
    expected = greedy_by_hand(folder, prompts, 5)
    (found,) = ranks.run(1, many_in_rank, folder, kind, prompts, init_process_group=False)
    assert found == expected


def many_in_rank(folder: Path, kind: str, prompts: list[list[int]], count: int = 5) -> list[list[int]]:
    from shardyard.infer.types import Request, Sampling

    engine = make(open_here(folder), kind, max_running=3)
    told = ask(engine, [Request(tuple(prompt), Sampling(max_new_tokens=count)) for prompt in prompts])
    engine.close()
    return [[token.id for token in tokens] for tokens, _ in told]


def test_prompts_that_are_read_in_several_steps_share_them_with_answers_under_way(ranks, tmp_path):
    folder = write_model(tmp_path / "m", "qwen3")
    prompts = [[3, 5], [(7 * place + 1) % 199 for place in range(150)], [9, 8, 7], list(range(100, 198))]
    expected = greedy_by_hand(folder, prompts, 6)
    (found,) = ranks.run(1, many_in_rank, folder, "continuous", prompts, 6, init_process_group=False)
    assert found == expected


@pytest.mark.parametrize("kind", ["continuous", "batches"])
def test_scores_that_are_nan_end_the_request_with_an_error(ranks, tmp_path, kind):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, nan_in_rank, folder, kind, init_process_group=False)


def nan_in_rank(folder: Path, kind: str) -> None:
    import torch

    from shardyard.infer.types import Request, Sampling

    opened = open_here(folder)
    with torch.no_grad():
        opened.model.model.norm.weight[3] = torch.nan
    engine = make(opened, kind)
    ((tokens, end),) = ask(engine, [Request((3, 4), Sampling(max_new_tokens=5))])
    assert (tokens, end.reason) == ([], "error") and "NaN" in end.error
    engine.close()
