"""What would run for each operation of a model, from its config.json alone: no weight is read."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from shardyard.config import Config
from shardyard.device import Device
from shardyard.models import packing
from shardyard.models.causal_lm import base_class
from shardyard.models.source import load_model_config
from shardyard.ops.apply import apply_operators
from shardyard.ops.registry import Row, Situation
from shardyard.parallel import Precision


def operators_of(config: Config, folder: Path, device: Device) -> tuple[Row, ...]:
    """The rows of the start-up table for the model whose config.json is in ``folder``, but for the loss: how
    that is computed, and whether packed documents pass their test, only the weights show.

    Raises:
        UserError: a switch asks for what cannot run on ``device``, or the config cannot be used.
    """
    trusted = config.model.trust_remote_code
    base, found = base_class(load_model_config(config.model, folder), str(folder), trust_remote_code=trusted)
    attention = packing.attention_for(config.model.attn_implementation, found)
    with torch.device("meta"):
        model = base._from_config(copy.deepcopy(found), attn_implementation=attention)
    dtype = Precision.of(config.parallel, device).compute
    compiled = config.optimization.compile != "none"
    return apply_operators(model, config.optimization, Situation(device.torch_device, dtype, compiled))
