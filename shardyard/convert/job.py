"""One conversion, from two folders' names to a result that is whole: what ``shardyard convert`` does."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardyard.checkpoint.manifest import MANIFEST
from shardyard.checkpoint.manifest import verify as damaged_files
from shardyard.convert.dcp import DcpWeights, side_files_of
from shardyard.convert.dcp_writer import write_dcp
from shardyard.convert.formats import NAMES, Form, form_of
from shardyard.convert.hf import HfWeights, read_config
from shardyard.convert.hf_writer import SHARD_BYTES, write_hf
from shardyard.convert.journal import JOURNAL
from shardyard.convert.mcore import Given, McoreLayout, open_mcore, write_mcore
from shardyard.convert.names import ModelNames
from shardyard.convert.progress import ByteProgress
from shardyard.convert.side_files import write_side_files
from shardyard.convert.verify import Verified, verify
from shardyard.convert.weights import CastWeights, Weights, WithConfig, config_dtype, config_of, total_bytes
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.convert")

_BYTES_PER_WORKER = 2_000_000_000
"""What makes it worth to start another process."""


@dataclass(frozen=True)
class Conversion:
    """What is asked for."""

    source: Path
    target: Path
    to: Form
    form: Form | None = None
    """The source's; None: found out."""
    config_dir: Path | None = None
    """The folder of config.json and what stands beside it, where the source has none."""
    dtype: torch.dtype | None = None
    """Of floating tensors. None: as stored; out of a run's checkpoint, which holds fp32, into a Hugging Face
    folder: what config.json states."""
    keep_dtype: bool = False
    """As stored, also there."""
    shard_bytes: int = SHARD_BYTES
    workers: int | None = None
    """None: by the number of bytes and cores."""
    check: bool = False
    """Compare the result with the source."""
    layout: McoreLayout = field(default_factory=McoreLayout)
    """Of a Megatron-core target."""
    given: Given = field(default_factory=Given)
    """What a Megatron-core source does not say of itself."""
    model_type: str | None = None
    """The family's name in Megatron-core's conversions, where it is not config.json's."""


@dataclass(frozen=True)
class Outcome:
    """What was done."""

    form: Form
    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    """Tensors of the source that the result's format has no place for."""
    dtypes: tuple[torch.dtype, ...]
    verified: Verified | None


def convert(job: Conversion) -> Outcome:
    """Do it. A killed conversion goes on from its finished files when it is asked for again.

    Raises:
        UserError: what cannot be converted, read or written, or a result that differs from its source.
    """
    form = form_of(job.source, job.form)
    _check_target(job)
    if form == "dcp" and (job.source / MANIFEST).exists():
        _check_source(job.source)
    side_dir = job.config_dir or _side_dir(job.source, form)
    weights = _in_dtype(job, form, open_weights(job, form))
    if form == job.to == "hf" and job.config_dir is not None:
        _check_config(weights)
    size = total_bytes(weights)
    _check_space(job.target, size)
    logger.info("%s is %s: %d tensors, %.1f MiB", job.source, NAMES[form], len(weights.facts), size / 2**20)
    left_out = _write(job, weights, side_dir, size)
    verified = None
    if job.check:
        result = _reopen(job, weights)
        verified = verify(weights, result, left_out=frozenset(left_out))
    dtypes = tuple(dict.fromkeys(dtype for _, dtype in weights.facts.values() if dtype.is_floating_point))
    return Outcome(form, len(weights.facts) - len(left_out), size, tuple(left_out), dtypes, verified)


def convert_to_hf(source: Path, config_dir: Path, target: Path) -> None:
    """A Megatron-core or DCP folder into a Hugging Face folder, as a run that starts from one asks for it.

    Raises:
        UserError: as `convert`.
    """
    convert(Conversion(source, target, "hf", config_dir=config_dir))


def open_weights(job: Conversion, form: Form) -> Weights:
    """The source as `Weights`, floating tensors as stored (block-fp8 in the dtype asked for, else bf16)."""
    if form == "hf":
        return HfWeights(job.source, config_dir=job.config_dir, dtype=job.dtype or torch.bfloat16)
    if form == "dcp":
        return DcpWeights(job.source, config_dir=job.config_dir)
    config = read_config(job.config_dir or job.source)
    weights = open_mcore(job.source, with_other_names(config), model_type=job.model_type, given=job.given)
    return WithConfig(weights, config)


def with_other_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that also has each key by the name that other versions of transformers write.

    Megatron-core's conversions know a family's own names; transformers 5 writes ``num_local_experts`` where
    Qwen3-MoE says ``num_experts``.
    """
    known = config.get("model_type") in CONFIG_MAPPING
    names = CONFIG_MAPPING[config["model_type"]].attribute_map if known else {}
    return {**{other: config[name] for other, name in names.items() if name in config}, **config}


def _check_config(weights: Weights) -> None:
    """The config.json of another folder has to be that of these weights, as far as transformers can tell."""
    if weights.config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        ModelNames(weights.config, weights.folder).units_to_memory(weights.facts)


def _in_dtype(job: Conversion, form: Form, weights: Weights) -> Weights:
    if job.dtype is not None:
        return CastWeights(weights, job.dtype)
    if form == "dcp" and job.to == "hf" and not job.keep_dtype:
        return _as_config_says(weights)
    return weights


def _as_config_says(weights: Weights) -> Weights:
    """Training keeps parameters in fp32; config.json states what they are published in."""
    assert isinstance(weights, DcpWeights)
    stated = config_dtype(weights.config)
    parameters = {
        dtype
        for name, (_, dtype) in weights.facts.items()
        if dtype.is_floating_point and name not in weights.buffers
    }
    if parameters != {torch.float32} or stated in (None, torch.float32):
        return weights
    assert stated is not None
    return CastWeights(weights, stated, kept=weights.buffers)


def _write(job: Conversion, weights: Weights, side_dir: Path, size: int) -> tuple[str, ...]:
    workers = job.workers or max(1, min(os.cpu_count() or 1, size // _BYTES_PER_WORKER, 4))
    if job.to == "hf":
        options: dict[str, Any] = {"side_dir": side_dir, "shard_bytes": job.shard_bytes, "workers": workers}
        write_hf(weights, job.target, **options)
        return ()
    if job.to == "dcp":
        return tuple(
            write_dcp(weights, job.target, side_dir=side_dir, part_bytes=job.shard_bytes, workers=workers)
        )
    with ByteProgress("writing", size) as progress:
        written = write_mcore(
            WithConfig(weights, with_other_names(weights.config)),
            job.target,
            job.layout,
            workers=workers,
            progress=progress.reach,
            model_type=job.model_type,
            write_beside=functools.partial(write_side_files, config_of(weights), side_dir, job.target),
        )
    return written.left_out


def _reopen(job: Conversion, weights: Weights) -> Weights:
    if job.to == "hf":
        return HfWeights(job.target)
    if job.to == "dcp":
        return DcpWeights(job.target)
    config = with_other_names(weights.config)
    return open_mcore(job.target, config, model_type=job.model_type, given=_given_of(job.layout))


def _given_of(layout: McoreLayout) -> Given:
    """What a folder in ``layout`` does not say of itself."""
    return Given(
        noop_layers=layout.noop_layers or None,
        num_layer_list=layout.num_layer_list,
        expert_tp=1 if layout.expert_tp == 1 else None,
        moe_tp_extend_ep=layout.moe_tp_extend_ep or None,
        schedules_method=layout.schedules_method,
    )


def _side_dir(source: Path, form: Form) -> Path:
    return side_files_of(source) if form == "dcp" else source


def _check_target(job: Conversion) -> None:
    """Nothing that is there is overwritten; unfinished work of a conversion is its own affair."""
    target = job.target
    if target.resolve() == job.source.resolve():
        raise UserError(f"{target} is both source and target; name another folder to write to")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a new folder")
    if not target.is_dir() or (target / JOURNAL).exists():
        return
    if foreign := next(target.iterdir(), None):
        raise UserError(f"{target} is not empty ({foreign.name}); name a new folder, nothing is overwritten")


def _check_source(folder: Path) -> None:
    """A checkpoint of ours is what was written: torch would read changed bytes without a word."""
    size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    with ByteProgress("checking", size) as progress:
        if faults := damaged_files(folder, progress.advance):
            raise UserError(f"{folder} is damaged: {'; '.join(faults)}")


def _check_space(target: Path, size: int) -> None:
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    held = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) if target.is_dir() else 0
    free = shutil.disk_usage(there).free
    if size - held > free:
        raise UserError(
            f"{target}: the result takes {size / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free there"
        )
