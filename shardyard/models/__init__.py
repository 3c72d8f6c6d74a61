"""From config.json to a parallelised model with its weights."""

from shardyard.models.build import BuiltModel, build_model
from shardyard.models.causal_lm import Placement
from shardyard.models.converted import Convert
from shardyard.models.head import LossOptions
from shardyard.models.read_ahead import read_ahead
from shardyard.models.source import ModelSource, load_model_config, resolve_source, tokenizer_options
from shardyard.models.weights import ReadWeights

__all__ = [
    "BuiltModel",
    "Convert",
    "LossOptions",
    "ModelSource",
    "Placement",
    "ReadWeights",
    "build_model",
    "load_model_config",
    "read_ahead",
    "resolve_source",
    "tokenizer_options",
]
