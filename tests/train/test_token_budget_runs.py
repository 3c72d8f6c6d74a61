"""Whole runs in micro-batches by tokens: the losses of counted rows, on other ranks, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tokenizers import byte_tokenizer
from support.whole_runs import EOS, PRETRAINING, metrics, numbers_of, train, write_numbered, write_workspace

ROWS = 23
BATCH = ("--training.per_device_train_batch_size", "8", "--training.num_train_epochs", "2")
BUDGET = ("--training.max_tokens_per_micro_batch", "128")
VALIDATED = ("--data.val_size", "4")
RESUME = ("--training.resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("budget"))
    write_numbered(folder / "rows.jsonl", range(1, ROWS + 1))
    write_numbered(folder / "text.jsonl", range(1, ROWS + 1), "text")
    return folder


@pytest.fixture(scope="module")
def counted(ranks: Any, workspace: Path) -> list[dict[str, Any]]:
    """One process, eight rows a micro-batch, which is the whole global batch."""
    train(ranks, workspace, "counted", *BATCH, *VALIDATED)
    return metrics(workspace, "counted")


def numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (r["step"], *(r[key] for key in ("consumed_samples", "consumed_tokens", "tokens") if key in r))
        for r in records
    ]


def losses(records: list[dict[str, Any]]) -> list[float]:
    """Of every update, and of every validation."""
    return [r["loss"] for r in records if "loss" in r] + [
        score["loss"] for r in records if "eval" in r for score in r["eval"].values()
    ]


def test_two_ranks_by_tokens_train_as_one_process_by_rows(
    ranks: Any, workspace: Path, counted: list[dict[str, Any]]
) -> None:
    words = ("--training.per_device_train_batch_size", "4", "--training.num_train_epochs", "2")
    leg = train(ranks, workspace, "tokens", *words, *VALIDATED, *BUDGET, world=2)
    records, tokenizer = metrics(workspace, "tokens"), byte_tokenizer(eos=EOS, pad="<|endoftext|>")
    assert numbers(records) == numbers(counted)
    assert len(losses(records)) > 6 and losses(records) == pytest.approx(losses(counted), rel=1e-4)
    trained = [number for step in sorted(leg.steps) for number in numbers_of(tokenizer, leg.steps[step])]
    rows = ROWS - 4
    assert len(trained) == 2 * rows
    assert sorted(trained[:rows]) == sorted(trained[rows:]) and len(set(trained)) == rows
    assert "Gradient Accumulation steps = by tokens" in leg.log
    assert leg.log.count("has a micro-batch of its own") == 0


def test_a_row_longer_than_the_budget_is_said_once_and_trained(
    ranks: Any, workspace: Path, counted: list[dict[str, Any]]
) -> None:
    words = ("--training.max_tokens_per_micro_batch", "40", "--training.max_steps", "2")
    leg = train(ranks, workspace, "long", *BATCH, *VALIDATED, *words, leg="long")
    assert leg.log.count("has a micro-batch of its own") == 1
    wanted = next(record["loss"] for record in counted if "loss" in record)
    assert losses(metrics(workspace, "long"))[0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("before", [(1, ()), (2, BUDGET), (4, ("--training.group_by_length",))], ids=str)
@pytest.mark.parametrize("after", [(1, BUDGET), (2, ("--training.group_by_length",)), (4, BUDGET)], ids=str)
def test_a_resume_on_other_ranks_with_another_cut_goes_on_with_the_same_numbers(
    ranks: Any, workspace: Path, counted: list[dict[str, Any]], before: Any, after: Any
) -> None:
    name = f"resumed-{before[0]}-{after[0]}-{len(before[1])}-{len(after[1])}"

    def leg(which: str, world: int, words: tuple[str, ...], *more: str) -> None:
        size = ("--training.per_device_train_batch_size", str(8 // world))
        train(ranks, workspace, name, *BATCH, *VALIDATED, *size, *words, *more, world=world, leg=which)

    stop = ("--training.save_steps", "2", "--training.lr_scheduler_type", "constant")
    train(ranks, workspace, f"{name}-whole", *BATCH, *VALIDATED, *stop)
    leg("before", *before, *stop, "--training.max_steps", "2")
    leg("after", *after, *stop, *RESUME, "--training.resume_force")
    whole, resumed = metrics(workspace, f"{name}-whole"), metrics(workspace, name)
    ours = {r["step"]: r["loss"] for r in resumed if "loss" in r}
    assert ours == pytest.approx({r["step"]: r["loss"] for r in whole if "loss" in r}, rel=1e-4)


DATA = {
    "packs": ("--data.packing",),
    "joined packs": ("--data.packing", "--data.cross_document_attention"),
    "stream": ("--data.streaming", "--data.buffer_size", "9", "--training.max_steps", "6"),
    "text": (*PRETRAINING, "--data.reset_attention_mask", "--data.dataset", "{folder}/text.jsonl"),
    "megatron": (
        *PRETRAINING, "--data.index_compat", "megatron", "--data.dataset", "{folder}/text.jsonl",
        "--training.max_steps", "6",
    ),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("cut", [BUDGET, ("--training.group_by_length",)], ids=str)
def test_any_kind_of_data_has_the_same_losses(ranks: Any, workspace: Path, kind: str, cut: Any) -> None:
    words = [word.format(folder=workspace) for word in DATA[kind]]
    plain = f"{kind}-plain".replace(" ", "-")
    if not (workspace / plain).exists():
        train(ranks, workspace, plain, *BATCH, *words)
    name = f"{plain}-{cut[0].rsplit('.')[-1]}"
    size = ("--training.per_device_train_batch_size", "4", "--training.dataloader_num_workers", "1")
    train(ranks, workspace, name, *BATCH, *size, *words, *cut, world=2)
    assert losses(metrics(workspace, name)) == pytest.approx(losses(metrics(workspace, plain)), rel=1e-4)
