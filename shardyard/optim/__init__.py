"""The optimizer, its schedule, and the norm of its gradients."""

from shardyard.optim.algorithms import first_state, state_bytes, state_bytes_here
from shardyard.optim.grad_norm import clip_factor, clip_gradients, owned_norms, square_sum
from shardyard.optim.groups import group_lines, group_parameters
from shardyard.optim.in_backward import InBackward
from shardyard.optim.optimizer import build_optimizer, set_lr
from shardyard.optim.schedule import Schedule

__all__ = [
    "InBackward",
    "Schedule",
    "build_optimizer",
    "clip_factor",
    "clip_gradients",
    "first_state",
    "group_lines",
    "group_parameters",
    "owned_norms",
    "set_lr",
    "square_sum",
    "state_bytes",
    "state_bytes_here",
]
