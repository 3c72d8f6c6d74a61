"""The loss of the validation sets: the same number for any batch size and any number of ranks.

A set's loss is the sum over all its labelled tokens divided by their number, never a mean of batch means.
Each rank adds up its rows in fp64, and one collective a set brings the sums together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardyard.data.batches import collate
from shardyard.data.cut import Cut, doc_lens_of
from shardyard.data.eval_sets import CountedSamples, EvalSet
from shardyard.data.order import Units
from shardyard.data.types import IGNORE_INDEX
from shardyard.device import Device, ProcessGroup
from shardyard.errors import UserError
from shardyard.evaluate.forwards import forward_parts
from shardyard.evaluate.untouched import untouched
from shardyard.monitor import ALL_SETS, EvalResult, EvalScore
from shardyard.parallel import Meshes

_FILLER_TOKEN = 0


@dataclass(frozen=True)
class _Share:
    """This rank's part of a set. The counts are those of the whole set."""

    name: str
    samples: CountedSamples
    batches: list[list[int]]
    """Rows of each forward; empty ones become fillers, so that all ranks have equally many."""
    forwards: list[int]
    """Forwards of each batch: the largest number of any rank, so that collectives match."""
    labelled: int
    tokens: int


class Evaluator:
    """Scores every set with the model as it stands; all ranks make and call it together.

    ``per_device`` rows make a batch, unless ``cut`` says otherwise; with ``packed`` false each document gets
    a forward of its own. How many forwards each rank makes is agreed on here, once, not again in `evaluate`.

    Raises:
        UserError: a set without a labelled token, two sets of one name, or one of several is called "all".
    """

    def __init__(
        self,
        model: Any,
        group: ProcessGroup,
        device: Device,
        sets: Sequence[EvalSet],
        *,
        meshes: Meshes,
        per_device: int,
        packed: bool,
        cut: Cut | None = None,
    ) -> None:
        _check_names([eval_set.name for eval_set in sets])
        self.model, self.group, self.device, self.packed = model, group, device, packed
        self.meshes = meshes
        self._shares = [self._share(eval_set, cut or Cut(per_device)) for eval_set in sets]

    def evaluate(self) -> EvalResult:
        """The scores of all sets.

        Nothing that training goes on with is changed: weights, gradients, optimizer, the modules' modes,
        every random generator; and the parameters are sharded again.
        """
        with untouched(self.model, self.device):
            return EvalResult({share.name: self._score(share) for share in self._shares})

    def _share(self, eval_set: EvalSet, cut: Cut) -> _Share:
        samples = eval_set.samples
        rows = Units.singles(np.arange(len(samples), dtype=np.int64))
        split = cut.share(
            rows, lambda row: doc_lens_of(samples, row[0]),
            dp_rank=self.meshes.dp_rank, dp_size=self.meshes.dp_size,
        )  # fmt: skip
        batches = [[row for unit in batch for row in unit] for batch in split]
        labelled = tokens = 0
        documents: list[int] = []
        for batch in batches:
            read = [samples[row] for row in batch]
            labelled += sum(int(np.count_nonzero(sample.labels != IGNORE_INDEX)) for sample in read)
            tokens += sum(len(sample.input_ids) for sample in read)
            documents.append(max(1, sum(len(sample.doc_lens) for sample in read)))
        # Packed rows need one forward whatever they hold, and no long list has to be exchanged.
        # Ranks that share a batch have the same rows; one of them counts them.
        mine = [labelled, tokens] if self.meshes.leads_batch else [0, 0]
        counts = self.group.gather([*mine, *([] if self.packed else documents)])
        forwards = [1] * len(batches) if self.packed else counts[:, 2:].max(0).values.int().tolist()
        if not counts[:, 0].sum():
            raise UserError(
                f"data.eval_dataset (or val_size, split): validation set {eval_set.name!r} has "
                f"{len(samples)} row(s) and no token with a label in them, so it has no loss; give it rows "
                "with something to predict, or leave it out"
            )
        return _Share(
            eval_set.name, samples, batches, forwards, int(counts[:, 0].sum()), int(counts[:, 1].sum())
        )

    def _score(self, share: _Share) -> EvalScore:
        started = time.perf_counter()
        loss_sum = self._loss_sum(share)
        sums = self.group.gather([loss_sum if self.meshes.counts_loss else 0.0])
        return EvalScore(float(sums.sum()), share.labelled, share.tokens, time.perf_counter() - started)

    def _loss_sum(self, share: _Share) -> float:
        """The sum of the loss over this rank's rows."""
        losses: list[torch.Tensor] = []
        for rows, forwards in zip(share.batches, share.forwards, strict=True):
            try:
                batch = collate([share.samples[row] for row in rows], rows, _FILLER_TOKEN)
                parts = forward_parts(batch, forwards, device=self.device, packed=self.packed)
                losses += [self.model(**part) for part in parts]
            except Exception as error:
                error.add_note(f"in validation set {share.name!r}, rows {rows} of this rank")
                raise
        return float(torch.stack(losses).cpu().double().sum())  # the only wait for the device


def _check_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"data.eval_dataset: two validation sets are called {twice[0]!r}; rename one")
    if len(names) > 1 and ALL_SETS in names:
        raise UserError(
            f"data.eval_dataset: {ALL_SETS!r} is the name of the total over the validation sets; rename this "
            "set"
        )
