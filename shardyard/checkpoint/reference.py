"""Checkpoints of the reference, to go on from: weights, AdamW's moments and the number of updates.

A folder of its, ``global_step_N``, is one of torch.distributed.checkpoint without a manifest of ours:

- ``model.model.<name>``: weights, as `weights_only` reads them;
- ``optimizer.[W.][state.][W.](model.)*<name>.<what>``: of AdamW's state the tensors ``exp_avg``,
  ``exp_avg_sq`` and ``step``. <name> is that of the parameter, or one that is tied to it. W is one word
  (``ep``, ``non_ep``: with expert parallelism it has two optimizers). Moments of merged experts have their
  weights' form;
- ``extra_state/extra_state_rank_<R>.pt``: a pickle, of which ``global_step`` is read, if torch reads the file
  as plain data.

Entries of bytes are pickles and stay unread: options of parameter groups are those of the run that goes on.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.folder import named, step_of
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.manifest import MANIFEST, METADATA, RUN_STATE
from shardyard.checkpoint.state import persistent_tensors, prepare_optimizer
from shardyard.checkpoint.weights_only import (
    OURS,
    REFERENCE,
    Saved,
    match_tensors,
    on_each,
    read_tensors,
    sizes_of,
    stands_for,
    tensor_metadata,
    tied_names,
    warn_of_grids,
)
from shardyard.errors import UserError
from shardyard.optim.low_bit import LowBitAdamW

logger = logging.getLogger("shardyard.checkpoint")

_KEY = "training.resume_from_checkpoint"
_OPTIMIZER, _MOMENTS, _STEP = "optimizer.", ("exp_avg", "exp_avg_sq"), "step"
_BEFORE_NAME = re.compile(r"optimizer\.(?:[A-Za-z_]\w*\.)?(?:state\.)?(?:[A-Za-z_]\w*\.)?(?:model\.)*")
_MEGATRON = "metadata.json"
"""Beside the .metadata of Megatron-core's torch_dist folders."""
_MOST_STEPS = 2**40


@dataclass(frozen=True)
class Reference:
    """What was read besides tensors. Without optimizer state the weights alone were, and ``step`` is 0."""

    step: int
    has_optimizer: bool


def is_reference(folder: Path) -> bool:
    """Whether ``folder`` looks like a checkpoint of the reference: DCP, and not ours nor Megatron's."""
    others = (MANIFEST, RUN_STATE, _MEGATRON)
    return (folder / METADATA).is_file() and not any((folder / name).exists() for name in others)


def newest_reference(folder: Path) -> Path | None:
    """The checkpoint of the highest step in the folder of a run of the reference, or in its checkpoints/."""
    for place in (folder, folder / "checkpoints"):
        if found := [path for path in named(place) if is_reference(path)]:
            return found[-1]
    return None


def check_reference(folder: Path) -> None:
    """Look at a checkpoint of the reference before anything is built. Its tensors are not read.

    Raises:
        UserError: it would run code, is cut short, lacks parts of tensors, or holds no model.
    """
    try:
        metadata = tensor_metadata(folder)
    except UserError as error:
        raise UserError(f"{_KEY}: {error}") from error
    weights = [key for key in metadata.state_dict_metadata if key.startswith(OURS)]
    if not weights or not all(key.startswith(REFERENCE) for key in weights):
        raise UserError(
            f"{_KEY}: {folder} has no {MANIFEST}, so it is no complete checkpoint of ours, and not all its "
            f"weights are called {REFERENCE}<name>, so it is none of the reference either"
        )
    for index, place in (metadata.storage_data or {}).items():
        file = folder / place.relative_path
        # A file that is missing may be on the disk of another node; whoever needs it misses it.
        if file.is_file() and file.stat().st_size < place.offset + place.length:
            raise UserError(
                f"{_KEY}: {folder} is damaged: {file.name} has {file.stat().st_size} bytes, and {index.fqn} "
                f"ends at {place.offset + place.length}"
            )
    for key, entry in metadata.state_dict_metadata.items():
        chunks: Any = getattr(entry, "chunks", ())
        held = sum(math.prod(chunk.sizes) for chunk in chunks)
        if held != math.prod(getattr(entry, "size", ())):
            raise UserError(f"{_KEY}: {folder} is damaged: it holds {held} values of {key}, not all of them")


def read_reference(folder: Path, peers: Peers, *, model: Any, optimizer: torch.optim.Optimizer) -> Reference:
    """Read a checkpoint of the reference into the live tensors, on any layout. Every rank calls it.

    Raises:
        UserError: on every rank, before a tensor has changed: the folder would run code, its tensors are not
            those of the model, or moments of trained parameters are missing. Or it is damaged.
    """
    what = f"{_KEY}: {folder}"
    metadata = on_each(peers, what, lambda: tensor_metadata(folder))
    tensors, tied = persistent_tensors(model), tied_names(model)
    wanted = _shapes(tensors, peers)
    saved = on_each(peers, what, lambda: match_tensors(folder, metadata, wanted, tied, (REFERENCE,)))
    pairs = [(saved[name], tensor) for name, tensor in tensors.items()]
    has_optimizer = any(key.startswith(_OPTIMIZER) for key in metadata.state_dict_metadata)
    step = peers.first(what, lambda: _global_step(folder)) if has_optimizer else 0
    if has_optimizer:
        if isinstance(optimizer, LowBitAdamW):
            raise UserError(
                f"{what} holds moments in fp32: resume it with training.optimizer_state_dtype: fp32 or bf16"
            )
        prepare_optimizer(optimizer)
        on_each(peers, what, lambda: _refuse_other_state(folder, optimizer))
        held = set(optimizer.state)
        trained = {name: p for name, p in model.named_parameters() if p in held}
        shapes = _shapes(trained, peers)
        state = on_each(peers, what, lambda: _match_state(folder, metadata, shapes, tied))
        for name, parameter in trained.items():
            own = optimizer.state[parameter]
            pairs += [(state[name, moment], own[moment]) for moment in _MOMENTS]
            if counted := state.get((name, _STEP)):
                pairs.append((counted, own[_STEP]))
            else:
                own[_STEP].fill_(step)
    warn_of_grids(folder, metadata, saved)
    peers.agree(what, lambda: read_tensors(folder, metadata, pairs))
    return Reference(step, has_optimizer)


def _refuse_other_state(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """What it keeps of its Muon is of no use, and of the others there are AdamW's moments only. Adam-mini's
    have AdamW's names and another shape, of which a part of AdamW's would be read.
    """
    wanted = {_STEP, *_MOMENTS}
    other = {what for state in optimizer.state.values() for what in state.keys() ^ wanted}
    other |= {
        what
        for parameter, state in optimizer.state.items()
        for what in _MOMENTS
        if what in state and state[what].shape != parameter.shape
    }
    if other:
        raise UserError(
            f"{_KEY}: {folder} holds AdamW's moments, and training.optimizer is one whose state differs "
            f"({', '.join(sorted(other))}); set training.optimizer: adamw, or {_instead(folder)}"
        )


def _shapes(tensors: Mapping[str, torch.Tensor], peers: Peers) -> dict[str, tuple[int, ...]]:
    """Of the tensors of all ranks."""
    return {name: shape for name, (shape, _) in Holdings.of(tensors, peers).facts.items()}


def _match_state(
    folder: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> dict[tuple[str, str], Saved]:
    """(parameter, "exp_avg" | "exp_avg_sq" | "step") -> its tensor in the folder; a step may be missing.

    Raises:
        UserError: moments are missing, there twice, or of another shape.
    """
    sizes = sizes_of(metadata)
    found: dict[tuple[str, str], Saved] = {}
    other = []
    for (name, what), key in _keys_of_state(folder, sizes, shapes, tied).items():
        saved = stands_for(key, sizes[key], shapes[name] if what != _STEP else ())
        if saved is not None:
            found[name, what] = saved
        elif what != _STEP:
            other.append(f"{name}: {what} {list(sizes[key])} there, {list(shapes[name])} here")
    if other:
        raise UserError(
            f"{_KEY}: {folder} holds moments of another shape for {len(other)} parameters (such as "
            f"{other[0]}); {_instead(folder)}"
        )
    missing = sorted(name for name in shapes if any((name, moment) not in found for moment in _MOMENTS))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(
            f"{_KEY}: {folder} lacks AdamW's moments ({' and '.join(_MOMENTS)}) of {len(missing)} of the "
            f"{len(shapes)} trained parameters: {shown}; {_instead(folder)}"
        )
    return found


def _keys_of_state(
    folder: Path, keys: Iterable[str], names: Mapping[str, Any], tied: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """(parameter, what) -> its key in the folder, in the forms of this module's head."""
    found: dict[tuple[str, str], list[tuple[bool, str]]] = {}
    for key in keys:
        middle, _, what = key.rpartition(".")
        if key.startswith(_OPTIMIZER) and what in (*_MOMENTS, _STEP):
            name = _name_in(middle, names, tied)
            if name is not None:
                found.setdefault((tied.get(name, name), what), []).append((name in tied, key))
    for (name, what), places in found.items():
        places.sort()  # a parameter's own name before one that is tied to it
        if len(places) > 1 and places[0][0] == places[1][0]:
            raise UserError(
                f"{_KEY}: {folder} holds {what} of {name} twice: {places[0][1]} and {places[1][1]}"
            )
    return {place: keys[0][1] for place, keys in found.items()}


def _name_in(text: str, names: Mapping[str, Any], tied: Mapping[str, str]) -> str | None:
    """The longest name of a parameter that ends ``text`` after an accepted beginning."""
    for name in _tails(text):
        if (name in names or tied.get(name) in names) and _BEFORE_NAME.fullmatch(text[: -len(name)]):
            return name
    return None


def _tails(text: str) -> list[str]:
    """What follows each dot of ``text``, the longest first."""
    parts = text.split(".")
    return [".".join(parts[begin:]) for begin in range(1, len(parts))]


def _instead(folder: Path) -> str:
    return f"to begin at step 0 with its weights alone, name it in model.model_name_or_path: {folder}"


def _global_step(folder: Path) -> int:
    """The updates that were made: of the first rank's extra state, else of the folder's name.

    Raises:
        UserError: neither tells.
    """
    path = folder / "extra_state" / "extra_state_rank_0.pt"
    try:
        with warnings.catch_warnings():  # that a pickle is of another protocol than torch's own
            warnings.simplefilter("ignore")
            extra = torch.load(path, map_location="cpu", weights_only=True)
        step = extra["global_step"]
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MOST_STEPS:
            return step
        why = f"its global_step is {step!r:.40}"
    except Exception as error:  # of every type: whatever a damaged or hostile pickle leads to
        why = _cause(error)
    named_step = step_of(folder)
    if named_step is None:
        raise UserError(
            f"{_KEY}: {path} does not tell the step ({why}), nor does the name of {folder}; call the folder "
            "global_step_<N>"
        )
    logger.warning("%s does not tell the step (%s): it is %d, of the folder's name", path, why, named_step)
    return named_step


def _cause(error: Exception) -> str:
    """In few words: torch's own text proposes to run what the file holds."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, KeyError | TypeError):
        return "it holds no global_step"
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it names {refused[1]}, which is not plain data"
    return "it holds more than plain data, or is damaged"
