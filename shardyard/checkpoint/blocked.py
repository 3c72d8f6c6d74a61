"""How a checkpoint holds moments in 8 or 4 bits, whose blocks are cut from each rank's part.

Each part is saved as it is, under a name that says which box of the whole tensor it is:

    optimizer.<parameter>.<moment>.<form>.<codes | scale | values>@<offset>+<shape>

Ranks that hold the same box save it once. A run with the same parts reads them back to the bit. With others
each rank reads the boxes that overlap its own, in fp32, and makes blocks of them anew: as large an error as
one more update has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from shardyard.checkpoint.pieces import Box, box_of
from shardyard.checkpoint.safe_reader import SafeReader
from shardyard.errors import UserError
from shardyard.optim.low_bit import Form, LowBitAdamW
from shardyard.parallel import local

Facts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""(shape, dtype) of each tensor of a checkpoint."""


def tensors_of(key: str, moment: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    """What is saved of this rank's part of ``moment``; nothing of an empty one."""
    box, own = box_of(moment), local(moment)
    if not box.count:
        return {}
    parts: dict[str, Any] = {"values": own}
    if form.is_in_blocks(own):
        parts = {"codes": own.codes, "scale": own.scale}  # pyright: ignore[reportAttributeAccessIssue]
    place = "+".join(",".join(map(str, numbers)) for numbers in box)
    return {f"{key}.{form.name}.{part}@{place}": tensor for part, tensor in parts.items()}


class Reblocking:
    """The moments in blocks of a checkpoint that was cut into other parts than this run's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Facts) -> None:
        self._form: Form | None = optimizer.form if isinstance(optimizer, LowBitAdamW) else None
        self._moments: dict[str, torch.Tensor] = {}
        self._saved = saved
        if self._form is not None and optimizer is not None:
            names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
            self._moments = {
                f"optimizer.{names[parameter]}.{what}.{self._form.name}": moment
                for parameter, state in optimizer.state.items()
                for what, moment in state.items()
                if moment.ndim
            }

    def concerns(self, key: str) -> bool:
        """Whether ``key`` is a part of a moment in blocks of this run's form."""
        return self._form is not None and "@" in key and f".{self._form.name}." in key

    def is_needed(self, wanted: Mapping[str, Any]) -> bool:
        """``wanted``: the tensors of all ranks. Without any such part in the checkpoint it is another set-up,
        which is refused elsewhere.
        """
        cut_so = any(map(self.concerns, self._saved))
        return cut_so and any(self.concerns(key) and key not in self._saved for key in wanted)

    def read(self, path: Path) -> None:
        """Fill this rank's moments.

        Raises:
            UserError: the checkpoint does not hold all of one.
        """
        boxes = self._boxes()
        needed: dict[str, torch.Tensor] = {}
        for base, moment in self._moments.items():
            for box, keys in boxes.get(base, {}).items():
                if box.overlap(box_of(moment)) is not None:
                    for key in keys.values():
                        shape, dtype = self._saved[key]
                        needed[key] = torch.empty(shape, dtype=dtype)
        dcp.load(needed, storage_reader=SafeReader(path), no_dist=True)
        for base, moment in self._moments.items():
            self._fill(path, base, moment, boxes.get(base, {}), needed)

    def _boxes(self) -> dict[str, dict[Box, dict[str, str]]]:
        """Moment -> box -> "codes", "scale" or "values" -> its key in the checkpoint."""
        found: dict[str, dict[Box, dict[str, str]]] = {}
        for key in filter(self.concerns, self._saved):
            head, _, place = key.rpartition("@")
            base, _, part = head.rpartition(".")
            found.setdefault(base, {}).setdefault(Box(*_numbers(place)), {})[part] = key
        return found

    def _fill(
        self, path: Path, base: str, moment: torch.Tensor, boxes: Mapping[Box, Any], read: Mapping[str, Any]
    ) -> None:
        own = box_of(moment)
        values, covered = torch.zeros(own.shape), 0
        for box, keys in boxes.items():
            if (common := box.overlap(own)) is not None:
                whole = self._values(base, box, {part: read[key] for part, key in keys.items()})
                values[common.within(own)] = whole[common.within(box)]
                covered += common.count
        if covered != own.count:
            raise UserError(f"{path} is damaged: it holds {covered} of {own.count} values of {base}")
        if own.count:
            local(moment).copy_(values.to(moment.device))

    def _values(self, base: str, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if "values" in parts:
            return parts["values"].view(box.shape)
        assert self._form is not None
        signed = not base.rpartition(".")[0].endswith("exp_avg_sq")
        return self._form.values(parts["codes"], parts["scale"], box.shape, signed=signed)


def _numbers(place: str) -> Iterator[tuple[int, ...]]:
    for numbers in place.split("+"):
        yield tuple(int(number) for number in numbers.split(","))
