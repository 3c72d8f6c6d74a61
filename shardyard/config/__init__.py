"""YAML and command line -> one frozen :class:`Config`, without importing torch."""

from shardyard.config.layout import Layout, resolve_layout
from shardyard.config.loader import ConfigError, Loaded, Origin, load_config
from shardyard.config.schema import Config
from shardyard.config.sections.data import DataConfig
from shardyard.config.sections.inference import EvaluationConfig, InferenceConfig
from shardyard.config.sections.model import ModelConfig
from shardyard.config.sections.optimization import OptimizationConfig
from shardyard.config.sections.parallel import ParallelConfig
from shardyard.config.sections.training import TrainingConfig

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "InferenceConfig",
    "Layout",
    "Loaded",
    "ModelConfig",
    "OptimizationConfig",
    "Origin",
    "ParallelConfig",
    "TrainingConfig",
    "load_config",
    "resolve_layout",
]
