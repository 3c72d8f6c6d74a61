"""The reference's Qwen3-8B pretraining YAML with a tiny model in its place: only paths and sizes change."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import tiny_config
from support.tokenizers import byte_tokenizer
from support.whole_runs import EOS, metrics

YAML = (
    Path(__file__).resolve().parents[2]
    / "examples"
    / "fsdp2"
    / "qwen3"
    / "pretrain_qwen3_8b_4k_fsdp2_A3.yaml"
)
CUTOFF_LEN = 4096
"""Of the YAML."""
STEPS = 2
SEED = 1
"""Of texts of which every window holds a piece long enough to tell whose it is."""
VOCAB_SIZE = 280
"""A few more than the tokenizer has."""


def write_texts(file: Path, count: int, length: tuple[int, int], seed: int = 0) -> list[str]:
    """``count`` documents like those of a crawl, of ``length`` words; no word comes twice in all of them."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        words = [f"d{number:02d}w{place}" for place in range(rng.randint(*length))]
        texts.append(" ".join(words) + ".")
    rows = [{"text": text, "timestamp": "2019-04-25", "url": f"page {n}"} for n, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in the place of the YAML's, with random weights that are read from its files."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("pretraining") / "model"
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    config.vocab_size = VOCAB_SIZE
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer(*more: str) -> Any:
    return byte_tokenizer(eos=EOS, pad="<|endoftext|>", special=("<|endoftext|>", EOS, *more))


def words_of(model: Path, folder: Path, data: Path, *more: str) -> list[str]:
    """What the example's script gives on the command line: paths; and how long to train."""
    return [
        str(YAML), "--model.model_name_or_path", str(model), "--data.dataset", str(data),
        "--training.output_dir", str(folder / "out"), "--model.cache_dir", str(folder / "cache"), *more,
    ]  # fmt: skip


def pretrain(words: list[str]) -> int:
    from shardyard.config import load_config
    from shardyard.train import run

    return run(load_config(words))


def plain_loss(model: Path, stream: list[int], windows: int) -> float:
    """Plain transformers over the first windows of the stream, mean over all targets."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for begin in range(0, windows * CUTOFF_LEN, CUTOFF_LEN):
        ids = torch.tensor([stream[begin : begin + CUTOFF_LEN]])
        targets = torch.tensor(stream[begin + 1 : begin + CUTOFF_LEN + 1])
        with torch.no_grad():
            total += F.cross_entropy(plain(input_ids=ids).logits[0], targets, reduction="sum").item()
    return total / (windows * CUTOFF_LEN)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_reference_s_yaml_trains_a_tiny_model(
    ranks: Any, model: Path, tmp_path: Path, world: int
) -> None:
    from transformers import AutoTokenizer

    texts = write_texts(tmp_path / "c4.jsonl", 30, (20, 200))
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    words = words_of(model, tmp_path, tmp_path / "c4.jsonl", "--training.max_steps", str(STEPS))
    ranks.run(world, pretrain, words, init_process_group=False, timeout_s=300)
    records = metrics(tmp_path, "out")
    assert [record["tokens"] for record in records] == [world * CUTOFF_LEN] * STEPS
    # The data is read in its own order (disable_shuffling), so the first step has the first windows.
    assert records[0]["loss"] == pytest.approx(plain_loss(model, stream, world), rel=1e-5)
    assert records[0]["loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)


def data_of(words: list[str], tokenizer: Any, dp_size: int = 1) -> Any:
    from shardyard.config import load_config
    from shardyard.data.build import build_run_data

    return build_run_data(load_config(words).config, tokenizer, dp_size=dp_size)


def test_another_tokenizer_builds_the_cache_anew_and_says_so(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "c4.jsonl", 12, (20, 200))
    words = words_of(model, tmp_path, tmp_path / "c4.jsonl")
    first, other = make_tokenizer(), make_tokenizer("w1", "w2")
    monkeypatch.setattr(logging.getLogger("shardyard"), "propagate", True)
    caplog.set_level(logging.INFO, "shardyard.data")
    told = []
    tokens = []
    for tokenizer in (first, first, other, first):
        caplog.clear()
        tokens.append(data_of(words, tokenizer).report.tokens)
        told.append(caplog.text)
    assert "tokenising (nothing in" in told[0]
    assert "tokenising" not in told[1] and "from the cache" in told[1]
    assert "tokenising again: tokenizer" in told[2] and " changed" in told[2]
    assert "from the cache" in told[3], "what the first tokenizer made is still there"
    lengths = [sum(len(t(text)["input_ids"]) + 1 for text in texts) - 1 for t in (first, other)]
    assert tokens == [lengths[0], lengths[0], lengths[1], lengths[0]] and lengths[0] != lengths[1]


@pytest.mark.parametrize(
    ("isolated", "shuffled"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.soak),
        pytest.param(True, False, marks=pytest.mark.soak),
    ],
)
def test_a_hundred_documents_longer_than_a_window_lose_no_token(
    model: Path, tmp_path: Path, shuffled: bool, isolated: bool
) -> None:
    """Every token is a target exactly once in an epoch, but the stream's first, or each document's."""
    from shardyard.data.batches import BatchLoader

    tokenizer = make_tokenizer()
    texts = write_texts(tmp_path / "long.jsonl", 100, (600, 1000), seed=SEED)
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
    assert min(lengths) > CUTOFF_LEN
    words = words_of(model, tmp_path, tmp_path / "long.jsonl", "--training.dataloader_drop_last", "false")
    words += ["--training.max_steps", "-1", "--training.num_train_epochs", "1"]
    words += ["--training.disable_shuffling", str(not shuffled), "--data.reset_attention_mask", str(isolated)]
    seen = [np.zeros(length, np.int64) for length in lengths]
    for rank in range(2):
        data = data_of(words, tokenizer, dp_size=2)
        for batch in BatchLoader(data.samples, data.sampler, dp_rank=rank, dp_size=2, per_device=1):
            for micro_batch in batch.micro_batches:
                if micro_batch.sample_ids:
                    count_targets(seen, texts, tokenizer, micro_batch)
    assert all(times[1:].tolist() == [1] * (len(times) - 1) for times in seen)
    firsts = sorted(int(times[0]) for times in seen)
    assert firsts == ([0] * 100 if isolated else [0] + [1] * 99)


def count_targets(seen: list[np.ndarray], texts: list[str], tokenizer: Any, micro_batch: Any) -> None:
    """Count each target of a window at its place in its document, which the words around it tell."""
    end = tokenizer.eos_token_id
    ids, labels = micro_batch.input_ids.tolist(), micro_batch.labels.tolist()
    # Position t of ``read`` is the target of position t - 1; the first is none in this window.
    read = [*ids, labels[-1]] if labels[-1] != -100 else ids
    is_target = [False, *(label != -100 for label in labels)][: len(read)]
    begin = 0
    while begin < len(read):
        stop = read.index(end, begin) + 1 if end in read[begin:] else len(read)
        text = tokenizer.decode([token for token in read[begin:stop] if token != end])
        document, place = find_piece(texts, tokenizer, text, starts=begin > 0, ends=read[stop - 1] == end)
        seen[document][place : place + stop - begin] += is_target[begin:stop]
        begin = stop


def find_piece(texts: list[str], tokenizer: Any, text: str, *, starts: bool, ends: bool) -> tuple[int, int]:
    """(document, tokens before it) of a piece that may be known to be a document's start, or its end."""
    places = []
    for number, whole in enumerate(texts):
        place = 0 if starts else whole.rfind(text) if ends else whole.find(text)
        fits = whole.startswith(text, place) if place >= 0 else False
        if fits and (not ends or place + len(text) == len(whole)):
            places.append((number, len(tokenizer(whole[:place])["input_ids"])))
    (found,) = places
    return found
