"""Forwards that leave no trace: training goes on as if they had not been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from shardyard.device import Device


@contextmanager
def untouched(model: Any, device: Device) -> Iterator[None]:
    """Inside, no gradients and no dropout; afterwards weights, modes, random generators are as before, and
    parameters are sharded.
    """
    with torch.no_grad(), _evaluation_mode(model), _generators_kept(device):
        yield


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """No dropout inside; afterwards each module has the mode it had, and its parameters are sharded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
            # A forward without a backward leaves modules gathered, the root for one: memory would stay
            # taken, and a checkpoint would list gathered parameters.
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def _generators_kept(device: Device) -> Iterator[None]:
    """Python's, NumPy's, torch's and the device's generators go on afterwards as if nothing had drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device.index] if device.is_accelerator else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
