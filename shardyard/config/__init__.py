"""YAML and command line -> one frozen :class:`Config`, without importing torch."""

from shardyard.config.layout import Layout, fewest_ranks, layout_of, layout_on, resolve_layout
from shardyard.config.loader import ConfigError, Loaded, Origin, load_config
from shardyard.config.model_shape import ModelShape, read_shape
from shardyard.config.schema import Config
from shardyard.config.sections.data import DataConfig
from shardyard.config.sections.evaluation import EvaluationConfig
from shardyard.config.sections.inference import InferenceConfig
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
    "ModelShape",
    "OptimizationConfig",
    "Origin",
    "ParallelConfig",
    "TrainingConfig",
    "fewest_ranks",
    "layout_of",
    "layout_on",
    "load_config",
    "read_shape",
    "resolve_layout",
]
