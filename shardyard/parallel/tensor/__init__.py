"""Tensor parallelism with sequence parallelism: who splits what, and the collectives between the parts."""

from shardyard.parallel.tensor.apply import apply_tensor_parallel
from shardyard.parallel.tensor.collectives import gather_sequence, scatter_sequence
from shardyard.parallel.tensor.plan import TensorPlan, plan_tensor_parallel

__all__ = [
    "TensorPlan",
    "apply_tensor_parallel",
    "gather_sequence",
    "plan_tensor_parallel",
    "scatter_sequence",
]
