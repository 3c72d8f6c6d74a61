"""What an operation is, and which of its implementations runs: named, by device, each with its eager twin.

The twin is always the family's own code. An implementation takes its place on the instance, under the
module's call, so that whatever wraps modules later (tensor parallelism, recomputation, FSDP) wraps it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn as nn

EAGER = "eager"
"""The name of the family's own code."""


@dataclass(frozen=True)
class Situation:
    """Where the operators will run, in which dtype, and whether a compiler sees them. ``tokens``: of an
    `Example`; enough for every row of a kernel's block, few enough to cost nothing.
    """

    device: torch.device
    dtype: torch.dtype
    compiled: bool = False
    tokens: int = 48


class Site(NamedTuple):
    """A module whose operation can be replaced. Sites of the same ``kind`` run the same numbers.

    ``block`` is the module that holds it.
    """

    name: str
    module: nn.Module
    kind: Any
    block: nn.Module | None = None


class Found(NamedTuple):
    """What a model has of an operation."""

    sites: list[Site]
    strangers: list[str]
    """Why some that look like one are not replaced, in words."""
    instead: str | None = None
    """What runs in their place, which no switch changes."""
    instead_is_fused: bool = False
    """So that ``true`` has what it asks for."""


class Example(NamedTuple):
    """The operation on shapes of the model: what the family computes, and from what.

    ``eager`` gets the inputs, an implementation the inputs and ``more``, which has no gradient.
    """

    eager: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    more: tuple[Any, ...] = ()


_PLAIN = (bool, int, float, str, tuple, list, torch.dtype)


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    ``install`` sets it on a site's module; ``run`` gives the function that is compared with the twin, on the
    inputs of an `Example`. ``devices``: the types it runs on, none for all. ``package``: the distribution and
    the module that it needs. ``lacking`` and ``unsuited`` say what stands in the way, of the device and of a
    site.
    """

    name: str
    install: Callable[[Site], None]
    run: Callable[[Site], Callable[..., Any]]
    devices: tuple[str, ...] = ()
    package: tuple[str, str] | None = None
    lacking: Callable[[Situation], str | None] = _nothing
    unsuited: Callable[[Site, Situation], str | None] = _nothing

    def missing(self, situation: Situation) -> str | None:
        """Why it cannot run on this device with what is installed; None if it can."""
        if self.devices and situation.device.type not in self.devices:
            return f"it runs on {', '.join(self.devices)} only"
        if self.package is not None and (reason := not_installed(*self.package)):
            return reason
        return self.lacking(situation)


@dataclass(frozen=True)
class Operation:
    """An operation, its switch (``optimization.<switch>``), and what ``auto`` and ``true`` take.

    ``fused``: the implementations that ``true`` may take, best first, by type of device; "" is any other.
    ``automatic``: for ``auto``, those of them that were measured to win, with the reason.
    """

    name: str
    switch: str
    module: str
    """What it belongs to, in words: "RMSNorm"."""
    find: Callable[[nn.Module], Found]
    example: Callable[[Site, Situation], Example]
    implementations: tuple[Implementation, ...]
    fused: Mapping[str, tuple[str, ...]]
    automatic: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    plain: str = EAGER
    """What the table calls the twin."""
    leave: Callable[[Site], object] = _nothing
    """What a site needs that keeps the twin."""
    beside_compiler: bool = False
    """Compiled layers leave it to eager code, so it is chosen as without a compiler."""

    def candidates(self, wish: str | bool, device: str) -> list[Implementation]:
        """The implementations to try, in order."""
        named = {implementation.name: implementation for implementation in self.implementations}
        if wish is True:
            return [named[name] for name in self.fused.get(device, self.fused.get("", ()))]
        if wish == "auto":
            return [named[name] for name in self.automatic.get(device, ())]
        return [named[wish]] if wish in named else []


class Row(NamedTuple):
    """A line of the start-up table."""

    operation: str
    runs: str
    why: str


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """What a module's numbers may follow from beside its parameters, to tell it from others of its class: its
    plain attributes and functions, and those of the modules in it.
    """
    own = sorted(
        (name, type(value).__name__, repr(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is None or isinstance(value, _PLAIN) or callable(value))
    )
    parts = ((name, settings_of(part)) for name, part in module._modules.items() if part is not None)
    return type(module), tuple(own), tuple(parts)


def not_installed(distribution: str, module: str) -> str | None:
    """Why a package cannot be used, without importing it; None if it can."""
    if find_spec(module) is None:
        return f"{distribution} is not installed"
    return None


def installed_version(distribution: str) -> str:
    """The version of a distribution, for the table; "" where it has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def listed(words: Collection[str], limit: int = 3) -> str:
    """The first few, and that there are more."""
    shown = list(words)[:limit]
    return "; ".join(shown) + (f"; and {len(words) - limit} more" if len(words) > limit else "")
