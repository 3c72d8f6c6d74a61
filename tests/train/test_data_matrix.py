"""Each row exactly once an epoch, told from the texts that real runs trained: any ranks, workers, source."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.run_data import Rendezvous
from support.tokenizers import byte_tokenizer
from support.whole_runs import (
    EOS,
    YAML,
    Document,
    Leg,
    numbers_of,
    train,
    write_numbered,
    write_workspace,
)

ROWS, EPOCHS, GLOBAL_BATCH = 21, 3, 4
STEPS = EPOCHS * -(-ROWS // GLOBAL_BATCH)
CELLS = list(itertools.product((1, 2, 4), (0, 2), (False, True), (False, True)))
"""Ranks, loader workers, streaming, packing."""
LOADED = {(1, 0, False, False), (2, 2, True, False), (2, 0, True, True), (4, 2, False, True)}
TRAINED = {(2, 2, False, True)}
"""The cells of the quick sample: of loaders alone, and of runs."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("matrix"))
    write_numbered(folder / "rows.jsonl", range(1, ROWS + 1))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(eos=EOS, pad="<|endoftext|>")


def cell_words(ranks: int, workers: int, streaming: bool, packing: bool) -> list[str]:
    """The settings of a cell, with global batches of GLOBAL_BATCH units on any number of ranks."""
    words = ["--training.gradient_accumulation_steps", str(GLOBAL_BATCH // ranks)]
    words += ["--training.dataloader_num_workers", str(workers)]
    if packing:
        words += ["--data.packing", "--data.preprocessing_batch_size", "16"]
    if streaming:  # no more packs than rows, so these steps cover the epochs
        words += ["--data.streaming", "--data.buffer_size", "10", "--training.max_steps", str(STEPS)]
    return words


def assert_each_once(numbers: list[int], *, whole: bool) -> None:
    """``numbers`` in training order; ``whole``: it ends with the last epoch."""
    assert len(numbers) == EPOCHS * ROWS if whole else len(numbers) >= EPOCHS * ROWS
    epochs = [numbers[epoch * ROWS : (epoch + 1) * ROWS] for epoch in range(EPOCHS)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, ROWS + 1))
    assert epochs[0] != epochs[1] != epochs[2], "each epoch in an order of its own"


def in_order(tokenizer: Any, leg: Leg) -> list[int]:
    return [number for step in sorted(leg.steps) for number in numbers_of(tokenizer, leg.steps[step])]


def loaded_numbers(workspace: Path, tokenizer: Any, cell: tuple[int, int, bool, bool]) -> list[int]:
    """What the loaders of all ranks give, in training order, without a model."""
    from shardyard.config import load_config
    from shardyard.data.batches import BatchLoader
    from shardyard.data.build import build_run_data
    from shardyard.data.leader import Role

    path = workspace / "loader.yaml"
    path.write_text(YAML.format(folder=workspace, out=workspace / "none"))
    config = load_config([str(path), *cell_words(*cell)]).config
    ranks, rendezvous, of_ranks = cell[0], Rendezvous(), []
    opened = []
    for rank in range(ranks):
        role = Role.of(rank=rank, local_rank=rank, node_rank=0, num_nodes=1, shared_file_system=False)
        data = build_run_data(config, tokenizer, dp_size=ranks, role=role, node=role, rendezvous=rendezvous)
        opened.append(data)
        loader = BatchLoader(
            data.samples, data.sampler, dp_rank=rank, dp_size=ranks, per_device=1, num_workers=cell[1]
        )
        steps = []
        for batch in loader:
            documents = [
                Document(ids.tolist(), labels.tolist())
                for m in batch.micro_batches
                if m.sample_ids
                for ids, labels in zip(m.input_ids.split(m.doc_lens), m.labels.split(m.doc_lens), strict=True)
            ]
            steps.append(numbers_of(tokenizer, documents))
        of_ranks.append(steps)
    for data in opened:
        data.close()
    return [number for steps in zip(*of_ranks, strict=True) for numbers in steps for number in numbers]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if cell in LOADED else pytest.mark.soak) for cell in CELLS]
)
def test_loaders_give_each_row_once_an_epoch(workspace, tokenizer, cell):
    numbers = loaded_numbers(workspace, tokenizer, cell)
    assert_each_once(numbers, whole=not (cell[2] and cell[3]))


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if cell in TRAINED else pytest.mark.soak) for cell in CELLS]
)
def test_runs_train_each_row_once_an_epoch(ranks, workspace, tokenizer, cell):
    name = "-".join(map(str, cell))
    leg = train(ranks, workspace, f"run-{name}", *cell_words(*cell), world=cell[0])
    assert_each_once(in_order(tokenizer, leg), whole=not (cell[2] and cell[3]))
