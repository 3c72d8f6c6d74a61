"""From config.json to a parallelised model with its weights."""

from shardyard.models.build import BuiltModel, build_model
from shardyard.models.causal_lm import Placement
from shardyard.models.source import load_model_config, resolve_source

__all__ = ["BuiltModel", "Placement", "build_model", "load_model_config", "resolve_source"]
