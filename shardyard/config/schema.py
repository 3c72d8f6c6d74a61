"""The whole configuration: its sections, and look-ups over all fields."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field
from pydantic.fields import FieldInfo

from shardyard.config.sections.base import Section
from shardyard.config.sections.data import DataConfig
from shardyard.config.sections.evaluation import EvaluationConfig
from shardyard.config.sections.inference import InferenceConfig
from shardyard.config.sections.model import ModelConfig
from shardyard.config.sections.optimization import OptimizationConfig
from shardyard.config.sections.parallel import ParallelConfig
from shardyard.config.sections.training import TrainingConfig


class Config(Section):
    """Everything a run is told. Frozen; functions take the section they need."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig
    optimization: OptimizationConfig = Field(default_factory=OptimizationConfig)
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimization": OptimizationConfig,
    "inference": InferenceConfig,
    "evaluation": EvaluationConfig,
}


def iter_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every field as (``section.key``, its pydantic description), in the documented order."""
    for section, model in SECTIONS.items():
        for key, info in model.model_fields.items():
            yield f"{section}.{key}", info


FIELDS: dict[str, FieldInfo] = dict(iter_fields())
"""``section.key`` -> pydantic's description of the field."""


def get(config: Config, path: str) -> object:
    """The value of ``section.key`` in ``config``."""
    section, key = path.split(".")
    return getattr(getattr(config, section), key)
