"""Settings of the data engine together, in whole runs: what is trained, also after a kill and a resume."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_indexed.megatron_peer import run_megatron
from support.tokenizers import byte_tokenizer
from support.whole_runs import (
    EOS,
    PRETRAINING,
    latest_checkpoint,
    metrics,
    numbers_of,
    refusal,
    train,
    train_and_kill,
    write_numbered,
    write_workspace,
)

RESUME = ("--training.resume_from_checkpoint", "latest")
MEASURED = ("step_ms", "seconds", "memory", "memory_reserved")
SOAK = pytest.mark.soak
TEXT_ROWS = 40


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("combined"))
    write_numbered(folder / "rows.jsonl", range(1, 38))
    write_numbered(folder / "first.jsonl", range(1, 13))
    write_numbered(folder / "second.jsonl", range(101, 109))
    write_numbered(folder / "text.jsonl", range(1, TEXT_ROWS + 1), "text")
    write_numbered(folder / "other.jsonl", range(101, 101 + TEXT_ROWS), "text")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(eos=EOS, pad="<|endoftext|>")


def text_data(folder: Path, *names: str) -> list[str]:
    """``data.dataset`` as text files, shares between them as they are."""
    return ["--data.dataset", ",".join(str(folder / n) if n.endswith("l") else n for n in names)]


def as_computed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: as_computed(part) for key, part in value.items() if key not in MEASURED}


def assert_resume_is_exact(
    ranks: Any, folder: Path, name: str, words: list[str], world: int
) -> list[dict[str, Any]]:
    """A run that is killed and resumed writes the metrics of the unbroken one, bit for bit."""
    words = [*words, "--training.save_steps", "3"]
    train(ranks, folder, f"{name}-whole", *words, world=world)
    train_and_kill(ranks, folder, f"{name}-cut", *words, world=world, leg="0", after=5)
    place = latest_checkpoint(folder, f"{name}-cut")
    leg = train(ranks, folder, f"{name}-cut", *words, *RESUME, world=world, leg="1")
    assert leg.first_step == place + 1 > 1
    whole, cut = (list(map(as_computed, metrics(folder, f"{name}-{end}"))) for end in ("whole", "cut"))
    assert cut == whole
    return whole


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=SOAK)])
def test_packing_recompute_accumulation_validation_and_early_stop_resume_exactly(ranks, workspace, world):
    words = [
        "--data.packing", "--parallel.recompute", "full", "--training.gradient_accumulation_steps", "2",
        "--data.val_size", "5", "--training.eval_steps", "2", "--training.early_stopping_patience", "3",
        "--training.early_stopping_min_delta", "10",
    ]  # fmt: skip
    records = assert_resume_is_exact(ranks, workspace, f"early-{world}", words, world)
    # Only the first validation can improve by 10, so that of step 8 is the third in a row that does not.
    assert [record["step"] for record in records if "eval" in record] == [2, 4, 6, 8]
    assert max(record["step"] for record in records) == 8


KINDS = {
    "packed": ["--data.packing"],
    "stream": ["--data.streaming", "--data.buffer_size", "10", "--training.max_steps", "12"],
    "stream-packed": [
        "--data.streaming", "--data.buffer_size", "10", "--training.max_steps", "12", "--data.packing",
    ],
    "text": [*PRETRAINING, "--data.reset_attention_mask"],
    "text-stream": [
        *PRETRAINING, "--data.streaming", "--data.buffer_size", "10", "--training.max_steps", "12",
    ],
    "text-megatron": [*PRETRAINING, "--data.index_compat", "megatron"],
}  # fmt: skip


def words_of(folder: Path, kind: str) -> list[str]:
    return [*KINDS[kind], *(text_data(folder, "text.jsonl") if kind.startswith("text") else [])]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_bit_for_bit(ranks, workspace, kind):
    assert_resume_is_exact(ranks, workspace, kind, words_of(workspace, kind), world=2)


CHANGES: dict[str, list[list[str]]] = {
    "packed": [
        ["--data.packing", "false"],
        ["--data.dataset", "{folder}/first.jsonl"],
        ["--data.cutoff_len", "100"],
        ["--training.seed", "7"],
        ["--data.preprocessing_batch_size", "16"],
        ["--data.val_size", "3"],
        ["--data.streaming", "--training.max_steps", "20"],
    ],
    "stream-packed": [
        ["--data.packing", "false"],
        ["--data.dataset", "{folder}/first.jsonl"],
        ["--data.cutoff_len", "100"],
        ["--training.seed", "7"],
        ["--data.buffer_size", "11"],
    ],
    "text": [
        ["--data.dataset", "{folder}/other.jsonl"],
        ["--data.cutoff_len", "40"],
        ["--training.seed", "7"],
        ["--data.reset_attention_mask", "false"],
        ["--data.split", "90,10,0"],
        ["--data.index_compat", "megatron", "--data.reset_attention_mask", "false"],
    ],
    "text-stream": [["--data.cutoff_len", "40"], ["--data.reset_attention_mask"]],
    "text-megatron": [["--training.seed", "7"], ["--data.cutoff_len", "40"], ["--data.index_compat", "null"]],
}
REFUSED = [(kind, number) for kind, changes in CHANGES.items() for number in range(len(changes))]


@pytest.fixture(scope="module")
def begun(ranks, workspace):
    """Makes the first two steps of a run of a kind, once, and gives its folder's name."""
    made: set[str] = set()

    def begin(kind: str) -> str:
        name = f"begun-{kind}"
        if kind not in made:
            train(ranks, workspace, name, *words_of(workspace, kind), "--training.num_train_epochs", "0.5")
            made.add(kind)
        return name

    return begin


@pytest.mark.parametrize(
    ("kind", "number"),
    [case if case == ("packed", 0) else pytest.param(*case, marks=SOAK) for case in REFUSED],
)
def test_resuming_with_other_data_is_refused_with_the_reason(ranks, workspace, begun, kind, number):
    change = [word.format(folder=workspace) for word in CHANGES[kind][number]]
    words = [*words_of(workspace, kind), "--training.num_train_epochs", "0.5", *RESUME, *change]
    name = begun(kind)
    before = metrics(workspace, name)
    assert "counts its place in other data" in refusal(ranks, workspace, name, *words)
    assert metrics(workspace, name) == before


def test_packing_changes_no_loss_unless_documents_see_each_other(ranks, workspace):
    """All rows in one update, so that packs and rows alone make the same global batch."""
    words = ["--training.gradient_accumulation_steps", "40", "--training.max_steps", "1"]
    words += ["--training.save_epochs", "0", "--training.save_steps", "0"]
    packing = ["--data.packing", "--data.cutoff_len", "256"]
    cases = {"rows": [], "packs": packing, "seeing": [*packing, "--data.cross_document_attention"]}
    found = {}
    for name, more in cases.items():
        train(ranks, workspace, f"update-{name}", *words, *more)
        (found[name],) = metrics(workspace, f"update-{name}")
    rows, packs, seeing = found["rows"], found["packs"], found["seeing"]
    assert packs["tokens"] == seeing["tokens"] == rows["tokens"]
    assert rows["samples"] == 37 and 37 / 4 > packs["samples"] == seeing["samples"] >= rows["tokens"] / 256
    for name in ("loss", "grad_norm"):
        assert packs[name] == pytest.approx(rows[name], rel=1e-5)
        assert abs(seeing[name] - rows[name]) > 1e-4 * rows[name]


def test_interleave_over_gives_each_set_its_share_and_every_row(ranks, workspace, tokenizer):
    words = ["--data.dataset", f"{workspace}/first.jsonl,{workspace}/second.jsonl"]
    words += ["--data.mix_strategy", "interleave_over", "--data.interleave_probs", "0.7,0.3"]
    words += ["--training.num_train_epochs", "2", "--training.save_steps", "0"]
    leg = train(ranks, workspace, "mixed", *words, world=2)
    numbers = [number for step in sorted(leg.steps) for number in numbers_of(tokenizer, leg.steps[step])]
    # The second set is the last to come whole: 8 / 0.3 = 26.7 samples; 0.7 of them, 18.7, are of the first.
    epoch = 19 + 8
    assert len(numbers) == 2 * epoch
    for part in (numbers[:epoch], numbers[epoch:]):
        assert sorted(n for n in part if n > 100) == list(range(101, 109))
        assert sum(n < 100 for n in part) == 19
    first, both = Counter(numbers[:epoch]), Counter(numbers)
    # 19 draws of 12, then 38: none comes again before each has come as often.
    assert {first[n] for n in range(1, 13)} == {1, 2} and {both[n] for n in range(1, 13)} == {3, 4}


def documents(folder: Path, name: str) -> list[str]:
    return re.findall(r'"text": "([^"]*)"', (folder / name).read_text())


def test_a_weighted_blend_with_isolated_documents_and_a_split_for_validation(ranks, workspace, tokenizer):
    words = [*PRETRAINING, *text_data(workspace, "0.75", "text.jsonl", "0.25", "other.jsonl")]
    words += [
        "--data.reset_attention_mask",
        "--data.split",
        "80,20,0",
        "--training.num_train_epochs",
        "1",
        "--training.save_steps",
        "0",
    ]
    leg = train(ranks, workspace, "blend", *words)
    sets = [documents(workspace, name) for name in ("text.jsonl", "other.jsonl")]
    kept = TEXT_ROWS * 80 // 100
    ends = tokenizer.convert_tokens_to_ids(EOS)
    tokens = [0, 0]
    for document in (document for step in leg.steps.values() for document in step):
        ids, labels = document.input_ids, document.labels
        assert labels[:-1] == ids[1:] and (labels[-1] == -100) == (ids[-1] == ends)
        assert ends not in ids[:-1], "attention stops where a document does"
        text = tokenizer.decode([token for token in ids if token != ends])
        owner = [number for number, texts in enumerate(sets) if any(text in one for one in texts[:kept])]
        assert owner, f"{text!r} is of no document for training"
        if len(owner) == 1:
            tokens[owner[0]] += len(ids)
    # Segments of a few characters can be of either set; all others show the shares.
    assert 0.7 < tokens[0] / sum(tokens) < 0.8
    held_out = [text for texts in sets for text in texts[kept:]]
    (validation,) = [record["eval"] for record in metrics(workspace, "blend") if "eval" in record]
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in held_out]
    assert validation["all"]["labelled"] == sum(length - 1 for length in lengths)
    assert validation["all"]["tokens"] == sum(lengths) - 2, "the last token of each set is a target only"


@pytest.mark.parametrize("pack", [True, pytest.param(False, marks=SOAK)])
def test_fine_tuning_on_preprocessed_files(ranks, workspace, tokenizer, pack):
    """The files of ``shardyard preprocess`` train as the rows themselves do."""
    from shardyard.cli.preprocess import preprocess

    prefix = workspace / f"prepared-{pack}" / "rows"
    words = ["--input", f"{workspace}/rows.jsonl", "--handler-name", "alpaca", "--prompt-type", "chatml"]
    words += ["--tokenizer-name-or-path", f"{workspace}/model", "--output-prefix", str(prefix)]
    preprocess([*words, "--seq-length", "128", *(["--pack"] if pack else [])])
    train_words = ["--data.data_manager_type", "mg", "--data.dataset", str(prefix), "--data.template", "null"]
    leg = train(ranks, workspace, f"prepared-{pack}", *train_words, "--training.num_train_epochs", "1")
    numbers = [number for step in sorted(leg.steps) for number in numbers_of(tokenizer, leg.steps[step])]
    assert sorted(numbers) == list(range(1, 38))
    if pack:
        return
    one = ["--training.num_train_epochs", "1"]
    train(ranks, workspace, "as-rows", *one)
    of_files, of_rows = (metrics(workspace, name) for name in ("prepared-False", "as-rows"))
    assert list(map(as_computed, of_files)) == list(map(as_computed, of_rows))


@pytest.mark.soak
def test_megatron_s_samples_are_trained_in_megatron_s_order_also_after_a_kill(ranks, workspace, tmp_path):
    from shardyard.data.indexed import IndexedWriter

    rng = np.random.default_rng(5)
    prefix = tmp_path / "tokens"
    with IndexedWriter(prefix, "uint16") as writer:
        for length in rng.integers(2, 60, 50).tolist():
            writer.add_document([*rng.integers(1, 300, length).tolist(), 0])
        writer.finish()
    steps, world = 24, 2
    words = [*PRETRAINING, "--data.index_compat", "megatron", "--data.dataset", str(prefix)]
    words += ["--training.max_steps", str(steps), "--training.seed", "1234"]
    legs = [train_and_kill(ranks, workspace, "megatron", *words, world=world, leg="0", after=6)]
    place = latest_checkpoint(workspace, "megatron")
    legs.append(train(ranks, workspace, "megatron", *words, *RESUME, world=world, leg="1"))
    given = {s: leg.steps[s] for leg in legs for s in leg.steps if leg is legs[1] or s <= place}
    again = train(ranks, workspace, "megatron-again", *words, world=world)
    assert again.steps == given
    job = {"do": "samples", "prefixes": [str(prefix)], "weights": None, "split": "100,0,0", "part": 0}
    job |= {"sizes": [steps * world, 0, 0], "cutoff_len": 32, "seed": 1234, "take": steps * world}
    (peer,) = run_megatron([job], tmp_path)
    ours = [document.input_ids for step in sorted(given) for document in given[step]]
    assert ours == peer["tokens"].tolist()
    assert [d.labels for step in sorted(given) for d in given[step]] == peer["labels"].tolist()
