"""Operators take their places in a model: one call on the built model, before anything else wraps it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.nn as nn

from shardyard.config import OptimizationConfig
from shardyard.errors import UserError
from shardyard.ops.attention_kernels import ATTENTION
from shardyard.ops.experts import EXPERTS
from shardyard.ops.norms import RMS_NORM
from shardyard.ops.registry import Found, Implementation, Operation, Row, Site, Situation, listed
from shardyard.ops.rotary import ROTARY
from shardyard.ops.self_check import fault_of
from shardyard.ops.swiglu import SWIGLU

logger = logging.getLogger("shardyard.ops")

OPERATIONS: tuple[Operation, ...] = (SWIGLU, RMS_NORM, ROTARY, ATTENTION, EXPERTS)


def apply_operators(
    model: nn.Module, optimization: OptimizationConfig, situation: Situation
) -> tuple[Row, ...]:
    """Replace the forwards of the modules that an operation was chosen for, on the instances.

    The model may be on the meta device; what is checked runs on tensors of the check's own.

    Returns:
        What runs, for the start-up table.

    Raises:
        UserError: a switch asks for what cannot run here.
    """
    return tuple(_apply(operation, model, optimization, situation) for operation in OPERATIONS)


def _apply(
    operation: Operation, model: nn.Module, optimization: OptimizationConfig, situation: Situation
) -> Row:
    wish = getattr(optimization, operation.switch)
    found = operation.find(model)
    row = _without_choice(operation, found, wish, situation)
    if row is not None:
        for site in found.sites:
            operation.leave(site)
        return row
    reasons: list[str] = []
    for implementation in operation.candidates(wish, situation.device.type):
        reason = _obstacle(operation, implementation, found.sites, situation)
        if reason is None:
            for site in found.sites:
                implementation.install(site)
            return Row(
                operation.name, implementation.name, _reason(operation, implementation, wish, situation)
            )
        reasons.append(f"{implementation.name}: {reason}")
    if wish != "auto":
        raise UserError(
            f"{_key(operation)}: {_shown(wish)} cannot be had ({listed(reasons)}); set it to auto"
        )
    for site in found.sites:
        operation.leave(site)
    return Row(operation.name, operation.plain, listed(reasons) or f"the fastest on {situation.device.type}")


def _without_choice(operation: Operation, found: Found, wish: str | bool, situation: Situation) -> Row | None:
    """The row of an operation that is left as it is, whatever implementations there are."""
    key, asked, plain = _key(operation), wish not in ("auto", False), operation.plain
    if found.instead is not None:
        if asked and not (wish is True and found.instead_is_fused):
            raise UserError(
                f"{key}: {_shown(wish)}, but this model runs {found.instead}, which no kernel of ours "
                "replaces; set it to auto"
            )
        return Row(operation.name, found.instead, "model.attn_implementation, or this family's own choice")
    if wish is False:
        return Row(operation.name, plain, f"{key} is false")
    if not found.sites and not found.strangers:
        if asked:
            logger.warning("%s has no effect: this model has no %s", key, operation.module)
        return Row(operation.name, plain, f"this model has no {operation.module}")
    if found.strangers and (asked or not found.sites):
        if asked:
            raise UserError(f"{key}: {found.strangers[0]}, which no fused kernel does; set it to false")
        return Row(operation.name, plain, found.strangers[0])
    if situation.compiled and not operation.beside_compiler:
        if wish not in ("auto", True):
            raise UserError(
                f"{key}: {wish} stands in a compiler's way, which fuses the family's own code; set it to "
                "auto, or optimization.compile to none"
            )
        return Row(operation.name, plain, "the compiler fuses the family's own code")
    return None


def _key(operation: Operation) -> str:
    return f"optimization.{operation.switch}"


def _shown(wish: str | bool) -> str:
    return str(wish).lower()


def _reason(
    operation: Operation, implementation: Implementation, wish: str | bool, situation: Situation
) -> str:
    if wish != "auto":
        return f"{_key(operation)} is {_shown(wish)}"
    return operation.automatic[situation.device.type][implementation.name]


def _obstacle(
    operation: Operation, implementation: Implementation, sites: Sequence[Site], situation: Situation
) -> str | None:
    """Why the implementation may not be used for these sites."""
    if reason := implementation.missing(situation):
        return reason
    for site in sites:
        if reason := implementation.unsuited(site, situation):
            return reason
    for site in {site.kind: site for site in sites}.values():
        if reason := fault_of(operation, implementation, site, situation):
            logger.warning(
                "%s: %s is not used, as %s (%s)", operation.name, implementation.name, reason, site.name
            )
            return reason
    return None
