"""All that ``shardyard data report`` tells, as plain values: its JSON, whose keys docs/data.md lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.config import Config
from shardyard.data.build import RunData
from shardyard.data.eval_sets import EvalSet
from shardyard.data.indexed import MegatronSamples
from shardyard.data.inspect import duplicates as dup
from shardyard.data.inspect.view import Source, View
from shardyard.data.report import Report


def survey(
    config: Config, data: RunData, view: View, *, world_size: int, data_parallel: int
) -> dict[str, Any]:
    """What became of the rows of each data set and of all, what an epoch holds, and what the run will do.

    Reads all tokens once, for duplicates (see ``READ_UP_TO``).
    """
    hashes = [_hashes(view, source) for source in view.sources]
    lengths = [_lengths(view, source) for source in view.sources]
    known = [found for found in hashes if found is not None]
    whole = np.concatenate(known) if len(known) == len(hashes) else None
    sources = [
        {
            "name": source.name,
            "path": str(source.path),
            "first_sample": source.first if source.count else None,
            **_counts(source.report),
            "duplicates": _duplicates(view, of_source, shift=source.first),
            "lengths": _histogram(view, of_lengths),
        }
        for source, of_source, of_lengths in zip(view.sources, hashes, lengths, strict=True)
    ]
    total = {
        **_counts(view.total),
        "duplicates": _duplicates(view, whole, shift=None if len(hashes) > 1 else 0),
        "lengths": _histogram(view, np.concatenate(lengths)),
    }
    return {
        "streaming": view.stretch,
        "sources": sources,
        "total": total,
        "epoch": _epoch(config, data, view),
        "validation": [_validation(one, _trained(view, whole)) for one in data.evals],
        "run": _run(config, data, world_size, data_parallel),
    }


def _counts(report: Report) -> dict[str, Any]:
    def told(counted: dict[str, Any]) -> dict[str, Any]:
        return {reason: {"rows": one.count, "first": one.first} for reason, one in counted.items()}

    return {
        "unit": report.unit,
        "rows": report.rows,
        "dropped": told(report.dropped),
        "truncated": report.truncated,
        "split": report.split,
        "notes": told(report.notes),
        "samples": report.samples,
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "trained_share": report.trained_tokens / report.tokens if report.tokens else None,
        "shortest": report.shortest,
        "mean": report.tokens / report.samples if report.samples else None,
        "longest": report.longest,
        "largest_id": report.largest_id,
    }


def _lengths(view: View, source: Source) -> np.ndarray:
    """Tokens of each document of token files, else of each sample."""
    if source.documents is not None:
        return np.diff(source.documents.document_offsets())
    return view.lengths[source.first : source.first + source.count]


def _unit(view: View) -> str:
    """What duplicates and lengths are of: documents of token files, else samples."""
    return "samples" if view.sources[0].documents is None else "documents"


def _hashes(view: View, source: Source) -> np.ndarray | None:
    """Of each sample or document; None where there is too much to read."""
    if source.documents is not None:
        reader = source.documents
        too_large = reader.num_tokens * reader.dtype.itemsize > dup.READ_UP_TO
        return None if too_large else dup.document_hashes(reader)
    tokens = int(view.lengths[source.first : source.first + source.count].sum())
    return (
        None if tokens * 8 > dup.READ_UP_TO else dup.sample_hashes(view.samples, source.first, source.count)
    )


def _duplicates(view: View, hashes: np.ndarray | None, *, shift: int | None) -> dict[str, Any] | None:
    """None where the data was too large to be read through.

    Samples are numbered as in ``View``, from ``shift`` on, documents in their set; ``shift`` None names none.
    """
    if hashes is None:
        return None
    unit, found = _unit(view), dup.duplicates(hashes)
    pair = None
    if found.first is not None and (shift is not None or unit == "samples"):
        pair = [number + (shift or 0 if unit == "samples" else 0) for number in found.first]
    return {"of": unit, "count": found.count, "first": pair}


def _histogram(view: View, lengths: np.ndarray) -> dict[str, Any]:
    """Counts by powers of two: those of at most ``up_to`` tokens (and more than the bucket before)."""
    if not len(lengths):
        return {"of": _unit(view), "median": None, "percentile_99": None, "buckets": []}
    ceilings = 2 ** np.arange(int(lengths.max()).bit_length() + 1, dtype=np.int64)
    counts = np.bincount(np.searchsorted(ceilings, lengths), minlength=len(ceilings))
    filled = np.flatnonzero(counts)
    return {
        "of": _unit(view),
        "median": float(np.median(lengths)),
        "percentile_99": float(np.percentile(lengths, 99)),
        "buckets": [
            {"up_to": int(ceilings[bucket]), "count": int(counts[bucket])}
            for bucket in range(int(filled[0]), int(filled[-1]) + 1)
        ],
    }


def _epoch(config: Config, data: RunData, view: View) -> dict[str, Any]:
    """What epoch 0 holds; of a stream, the windows that were looked at."""
    if isinstance(data.samples, MegatronSamples):
        per_source: list[int] = data.samples.samples_per_set
        return {"samples": len(view), "per_source": _named(view, per_source), "packs": None}
    indices = view.order.units(0, 0, view.order.size(0)).indices
    starts = [source.first for source in view.sources]
    per_source = np.bincount(
        np.searchsorted(starts, indices, side="right") - 1, minlength=len(starts)
    ).tolist()
    packs = None
    if view.is_packed:
        count, capacity = view.order.size(0), config.data.cutoff_len
        packs = {
            "count": count,
            "capacity": capacity,
            "samples_each": len(indices) / count if count else None,
            "share_filled": int(view.lengths[indices].sum()) / (count * capacity) if count else None,
        }
    return {"samples": len(indices), "per_source": _named(view, per_source), "packs": packs}


def _named(view: View, counts: list[int]) -> list[dict[str, Any]]:
    return [
        {"name": source.name, "samples": count} for source, count in zip(view.sources, counts, strict=True)
    ]


def _trained(view: View, hashes: np.ndarray | None) -> np.ndarray | None:
    """The hashes of all samples that are trained; None where they are documents, or not all were read."""
    if hashes is None or _unit(view) != "samples" or view.stretch is not None:
        return None
    return np.delete(hashes, view.held_out)


def _validation(one: EvalSet, trained: np.ndarray | None) -> dict[str, Any]:
    samples, count = one.samples, len(one.samples)
    also_trained = None
    if trained is not None:
        also_trained = int(np.isin(dup.sample_hashes(samples, 0, count), trained).sum())
    tokens = sum(len(samples[number].input_ids) for number in range(count))
    return {"name": one.name, "samples": count, "tokens": tokens, "also_trained": also_trained}


def _run(config: Config, data: RunData, world_size: int, data_parallel: int) -> dict[str, Any]:
    sampler = data.sampler
    return {
        "world_size": world_size,
        "data_parallel": data_parallel,
        "global_batch": sampler.global_batch,
        "updates_per_epoch": None if config.data.index_compat else sampler.updates_per_epoch,
        "total_steps": sampler.last_step(cursor=0, step=0),
    }
