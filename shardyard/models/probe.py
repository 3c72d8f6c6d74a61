"""Forwards of a built model that are no training: what the checks at start learn from the live model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """No gradients and no dropout inside; afterwards the mode is what it was, and parameters are sharded.

    Every rank must probe, as each forward gathers parameters.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        # A forward without a backward leaves modules gathered, the root for one; whoever lists the
        # parameters next (the optimizer) must find the sharded ones.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # One that was gathered ahead and not used (a head alone comes before the first layer, where
                # it is tied) would be taken by the next forward, whatever has been loaded in between.
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group.wait_for_unshard()
                module.reshard()
