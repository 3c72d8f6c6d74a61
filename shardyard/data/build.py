"""The data of a run: prepared by one rank, opened by all, in an order that any number of ranks takes up."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardyard.config import Config
from shardyard.config.data_rules import split_shares
from shardyard.data.batches import Samples
from shardyard.data.eval_sets import CountedSamples, EvalSet
from shardyard.data.indexed import MegatronSamples
from shardyard.data.key import digest, document_parts, quick_facts, sample_parts
from shardyard.data.leader import Prepared, Rendezvous, Role, prepare_once
from shardyard.data.mixing import kept_for_validation, order_of_run, packs
from shardyard.data.order import EpochOrder
from shardyard.data.parts import (
    ChosenSamples,
    JoinedSamples,
    Part,
    open_held_out,
    open_part,
    open_whole,
    token_prefix,
)
from shardyard.data.prepare import Preparation, cache_folder
from shardyard.data.report import Preview, Report, preview
from shardyard.data.sampler import ElasticSampler, Sampler, global_batch_of
from shardyard.data.sets import resolve_sets
from shardyard.data.stream import Stream, build_stream
from shardyard.data.stream.build import Seat
from shardyard.data.types import IGNORE_INDEX
from shardyard.errors import UserError

__all__ = ["RunData", "build_eval_sets", "build_run_data", "cache_folder", "longest_unit"]

logger = logging.getLogger("shardyard.data")


@dataclass(frozen=True)
class RunData:
    """The samples of a run and the batches that they come in."""

    samples: Samples
    sampler: Sampler
    parts: tuple[Part, ...]
    evals: tuple[EvalSet, ...]
    eval_parts: tuple[Part, ...]
    """The data sets of ``data.eval_dataset``, each apart; their counts are not in ``report``."""
    identity: str
    """Names the sequence that the run's cursor counts in: data, order and seed."""
    preview: Preview
    merge_packs: bool = False
    stream: Stream | None = None
    """Where the samples come from, if they are read while training goes on."""

    @property
    def report(self) -> Report:
        """The counts of all data sets together."""
        return Report.total([part.report for part in self.parts])

    def close(self) -> None:
        """End what works for a stream in the background; nothing without one."""
        if self.stream is not None:
            self.stream.close()


def build_run_data(
    config: Config,
    tokenizer: Any,
    *,
    dp_size: int = 1,
    role: Role | None = None,
    node: Role | None = None,
    rendezvous: Rendezvous | None = None,
    local_ranks: int = 1,
    vocab_size: int | None = None,
) -> RunData:
    """Prepare the data that ``config`` names, or open what an earlier run prepared from the same content.

    The leader of each group of ranks works; the others wait at ``rendezvous``, without a collective. Prepared
    data lies in ``<model.cache_dir or ~/.cache/shardyard>/tokenized/<key>``, or in ``data.tokenized_path``: a
    folder that is absent or empty is filled, one that holds the same is read, any other is refused (with
    ``overwrite_cache``, samples made otherwise are replaced; a folder that holds something else never is).

    ``dp_size`` is the number of ranks that see different batches; ``node`` is this rank's part on its node,
    where a stream is made, whoever prepares the rest; ``vocab_size`` is the model's, beyond which a stream
    refuses ids (other data tells its largest id in ``report``).

    Raises:
        UserError: on every rank, for a fault in the input or settings, or when nothing would be trained.
    """
    if config.data.dataset is None:
        raise UserError("data.dataset: nothing to train on; name a file, a folder or a data set")
    preparation = Preparation(config, tokenizer, local_ranks)
    role = role or Role()
    named = _named_evals(config, preparation, role, rendezvous)
    if config.data.streaming:
        seat = _seat(config, node or role, rendezvous)
        return _as_stream(config, tokenizer, named, seat, dp_size, vocab_size)
    prepared = prepare_once(lambda: preparation.run(config.data.dataset), role, rendezvous, "train")
    if config.data.index_compat is not None:
        return _as_megatron(config, tokenizer, prepared, named, dp_size)
    parts = tuple(open_part(config, one, number) for number, one in enumerate(prepared.sets))
    Report.total([part.report for part in parts]).require_training_data()
    joined = JoinedSamples([part.samples for part in parts])
    kept_out = kept_for_validation(config, joined)
    order = order_of_run(config, parts, joined, kept_out)
    data = config.data
    return RunData(
        samples=joined,
        sampler=ElasticSampler.of(config.training, order, dp_size=dp_size),
        parts=parts,
        evals=(*named.sets, *_held_out(config, prepared, joined, kept_out)),
        eval_parts=named.parts,
        identity=f"samples {prepared.key}, {order.describe()}{_told(config)}",
        preview=first_preview(joined, tokenizer),
        merge_packs=data.cross_document_attention and packs(config),
    )


def build_eval_sets(
    config: Config,
    tokenizer: Any,
    *,
    role: Role | None = None,
    rendezvous: Rendezvous | None = None,
    local_ranks: int = 1,
) -> tuple[tuple[EvalSet, ...], tuple[Part, ...]]:
    """The sets of ``data.eval_dataset`` alone, and the data sets that they are made of; as `build_run_data`.

    Raises:
        UserError: on every rank, for a fault in the input or settings.
    """
    preparation = Preparation(config, tokenizer, local_ranks)
    named = _named_evals(config, preparation, role or Role(), rendezvous)
    return named.sets, named.parts


def longest_unit(config: Config, data: RunData) -> int:
    """Tokens that a sample or pack of the run may have: of a stream nobody knows more than the cut-off."""
    grows = config.data.streaming or packs(config)
    return config.data.cutoff_len if grows else data.report.longest


def _seat(config: Config, node: Role, rendezvous: Rendezvous | None) -> Seat:
    """This rank's place at a stream: the ranks of a node share a folder that no other run has."""
    run_id = secrets.token_hex(8)
    if rendezvous is not None:
        if node.is_leader:
            rendezvous.publish(f"data/stream/{node.group}", run_id)
        run_id = rendezvous.wait(f"data/stream/{node.group}")
    return Seat(cache_folder(config).parent / "stream", "", run_id, node.is_leader)


def _as_stream(
    config: Config,
    tokenizer: Any,
    evals: _Named,
    seat: Seat,
    dp_size: int,
    vocab_size: int | None,
) -> RunData:
    named = resolve_sets(config, config.data.dataset)
    for one in named:
        if one.prefix is not None:
            raise UserError(
                f"data.streaming: {one.prefix}.bin is mapped into memory, which reads no more than is "
                "needed; set "
                "data.streaming to false"
            )
        if one.weight is not None:
            raise UserError(
                "data.dataset: shares between the paths do not go with data.streaming; give "
                "data.mix_strategy interleave_over (or interleave_under) and data.interleave_probs"
            )
    entries = [one.entry for one in named if one.entry is not None]
    parts = document_parts if config.data.data_manager_type == "mg" else sample_parts
    key = digest(  # a list: the order of the sets is part of it, and two may have one name
        {
            "sets": [
                parts(config, one, tokenizer, {file: quick_facts(file) for file in one.files})
                for one in entries
            ]
        }
    )
    stream = build_stream(
        config, entries, tokenizer, key=key, run_id=seat.run_id, folder=seat.root,
        is_local_leader=seat.is_local_leader, global_batch=global_batch_of(config.training, dp_size),
        vocab_size=vocab_size,
    )  # fmt: skip
    shown = stream.preview_sample
    return RunData(
        samples=stream.store,
        sampler=stream.sampler,
        parts=(Part("the stream's first window", [], stream.first_report, stream.folder),),
        evals=evals.sets,
        eval_parts=evals.parts,
        identity=f"samples {key}, {stream.order}",
        preview=Preview("(none)", [], []) if shown is None else preview(shown, tokenizer),
        merge_packs=config.data.cross_document_attention and packs(config),
        stream=stream,
    )


def _told(config: Config) -> str:
    """What else the numbering of samples depends on."""
    data = config.data
    told = ""
    if data.data_manager_type == "mg" and config.training.stage == "pt":
        told = f", windows of {data.cutoff_len} tokens, split {split_shares(data.split)}"
        told += f", reset {data.reset_attention_mask}"
    return told + (f", without {data.val_size} for validation" if data.val_size else "")


class _Named(NamedTuple):
    """The validation sets of ``data.eval_dataset``, and the data sets that they are made of."""

    sets: tuple[EvalSet, ...] = ()
    parts: tuple[Part, ...] = ()


def _named_evals(
    config: Config, preparation: Preparation, role: Role, rendezvous: Rendezvous | None
) -> _Named:
    """One set of all together, or each apart with eval_on_each_dataset."""
    if not config.data.eval_dataset:
        return _Named()
    dataset = config.data.eval_dataset
    prepared = prepare_once(lambda: preparation.run(dataset, "-eval"), role, rendezvous, "eval")
    parts = tuple(open_whole(config, one) for one in prepared.sets)
    sets = [EvalSet(part.name, part.samples) for part in parts]
    return _Named(tuple(sets if config.data.eval_on_each_dataset else _together(sets)), parts)


def _held_out(
    config: Config, prepared: Prepared, joined: JoinedSamples, kept_out: np.ndarray
) -> list[EvalSet]:
    if len(kept_out):
        return [EvalSet("validation", ChosenSamples(joined, kept_out))]
    return _split_evals(config, prepared)


def _split_evals(config: Config, prepared: Prepared) -> list[EvalSet]:
    """The documents that ``data.split`` keeps for validation."""
    is_stream = config.data.data_manager_type == "mg" and config.training.stage == "pt"
    if not is_stream or split_shares(config.data.split)[1] == 0:
        return []
    sets = [EvalSet(one.name, open_held_out(config, one, number)) for number, one in enumerate(prepared.sets)]
    return _together([one for one in sets if len(one.samples)])


def _together(sets: Sequence[EvalSet]) -> list[EvalSet]:
    if not sets:
        raise UserError("data.split: its validation share is too small for one document; make it larger")
    if len(sets) == 1:
        return [EvalSet("validation", sets[0].samples)]
    return [EvalSet("validation", JoinedSamples([one.samples for one in sets]))]


def _as_megatron(config: Config, tokenizer: Any, prepared: Prepared, evals: _Named, dp_size: int) -> RunData:
    """The samples that megatron-core gives for this seed, in its order: the shuffling is in the index."""
    training, data = config.training, config.data
    prefixes = [token_prefix(one) for one in prepared.sets]
    weights = [one.weight for one in prepared.sets if one.weight is not None]
    wanted = None
    if training.max_steps > 0:
        wanted = training.max_steps * global_batch_of(training, dp_size)
    elif weights or len(prefixes) == 1:
        wanted = max(1, round(training.num_train_epochs * _epoch_size(config, prefixes)))
    samples = MegatronSamples(
        prefixes, weights or None, split=data.split, num_samples=wanted, cutoff_len=data.cutoff_len,
        seed=training.seed, reset_attention_mask=data.reset_attention_mask,
    )  # fmt: skip
    order = EpochOrder(len(samples), seed=training.seed, shuffle=False)
    inputs = len(samples) * data.cutoff_len
    report = Report.total([Report.from_json(one.report) for one in prepared.sets])
    report.samples, report.tokens, report.trained_tokens = len(samples), inputs, inputs
    report.shortest = report.longest = data.cutoff_len
    sampler = ElasticSampler(
        order,
        global_batch=global_batch_of(training, dp_size),
        drop_last=training.dataloader_drop_last,
        num_train_epochs=1.0,
        max_steps=training.max_steps,
    )
    return RunData(
        samples=samples,
        sampler=sampler,
        parts=(Part("megatron's index", samples, report, prefixes[0]),),
        evals=(*evals.sets, *_split_evals(config, prepared)),
        eval_parts=evals.parts,
        identity=f"megatron's samples of {prepared.key}, seed {training.seed}, {data.cutoff_len} tokens, "
        f"split {data.split}, reset {data.reset_attention_mask}, {len(samples)} in all"
        + (f", shares {'/'.join(f'{weight:.6g}' for weight in weights)}" if weights else ""),
        preview=first_preview(samples, tokenizer),
    )


def _epoch_size(config: Config, prefixes: Sequence[Path]) -> int:
    """Megatron's samples in one epoch of every set."""
    data = config.data
    return sum(
        len(
            MegatronSamples(
                [prefix], split=data.split, num_samples=None, cutoff_len=data.cutoff_len,
                seed=config.training.seed,
            )
        )
        for prefix in prefixes
    )  # fmt: skip


def first_preview(samples: CountedSamples, tokenizer: Any) -> Preview:
    """The first sample with a trained token, of the first hundred."""
    candidates = (samples[index] for index in range(min(len(samples), 100)))
    sample = next((s for s in islice(candidates, 100) if (s.labels != IGNORE_INDEX).any()), samples[0])
    return preview(sample, tokenizer)
