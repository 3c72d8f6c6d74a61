"""Operators take their places in a model: one call on the built model, before anything else wraps it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.nn as nn

from shardyard.config import OptimizationConfig
from shardyard.errors import UserError
from shardyard.ops.norms import RMS_NORM
from shardyard.ops.registry import EAGER, Implementation, Operation, Row, Site, Situation, listed
from shardyard.ops.self_check import fault_of
from shardyard.ops.swiglu import SWIGLU

logger = logging.getLogger("shardyard.ops")

OPERATIONS: tuple[Operation, ...] = (RMS_NORM, SWIGLU)


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
    key, wish = f"optimization.{operation.switch}", getattr(optimization, operation.switch)
    if wish is False:
        return Row(operation.name, EAGER, f"{key} is false")
    if wish == "auto" and situation.compiled:
        return Row(operation.name, EAGER, "the compiler fuses the family's own code")
    found = operation.find(model)
    asked = wish != "auto"
    if not found.sites and not found.strangers:
        if asked:
            logger.warning("%s has no effect: this model has no %s", key, operation.module)
        return Row(operation.name, EAGER, f"this model has no {operation.module} that is known")
    if not found.sites or (asked and found.strangers):
        if asked:
            raise UserError(f"{key}: {found.strangers[0]}, which no fused kernel does; set it to false")
        return Row(operation.name, EAGER, found.strangers[0])
    reasons: list[str] = []
    for implementation in operation.candidates(wish, situation.device.type):
        reason = _obstacle(operation, implementation, found.sites, situation)
        if reason is None:
            for site in found.sites:
                implementation.install(site)
            why = operation.automatic.get(situation.device.type, {}).get(implementation.name, "")
            return Row(operation.name, implementation.name, f"{key} is {str(wish).lower()}" if asked else why)
        reasons.append(f"{implementation.name}: {reason}")
    if asked:
        raise UserError(f"{key}: {str(wish).lower()} cannot be had ({listed(reasons)}); set it to auto")
    return Row(operation.name, EAGER, listed(reasons) or f"the fastest on {situation.device.type}")


def _obstacle(
    operation: Operation, implementation: Implementation, sites: Sequence[Site], situation: Situation
) -> str | None:
    """Why the implementation may not be used for these sites."""
    if reason := implementation.missing(situation):
        return reason
    for site in sites:
        if reason := implementation.unsuited(site):
            return reason
    for site in {site.kind: site for site in sites}.values():
        if reason := fault_of(operation, implementation, site, situation):
            logger.warning(
                "%s: %s is not used, as %s (%s)", operation.name, implementation.name, reason, site.name
            )
            return reason
    return None
