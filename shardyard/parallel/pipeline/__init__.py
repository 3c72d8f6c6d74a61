"""Pipeline parallelism: which stage owns what, a model cut to a stage, the order of the micro-batches."""

from shardyard.parallel.pipeline.model import PipelineModel, parts_of, tied_partners
from shardyard.parallel.pipeline.split import Costs, StagePlan, even_split, plan_stages, stages_per_rank
from shardyard.parallel.pipeline.stages import (
    Stage,
    WholeModel,
    check_hands_on,
    costs_of,
    describe_whole,
    prune,
    tied_weight_shared,
)

__all__ = [
    "Costs",
    "PipelineModel",
    "Stage",
    "StagePlan",
    "WholeModel",
    "check_hands_on",
    "costs_of",
    "describe_whole",
    "even_split",
    "parts_of",
    "plan_stages",
    "prune",
    "stages_per_rank",
    "tied_partners",
    "tied_weight_shared",
]
