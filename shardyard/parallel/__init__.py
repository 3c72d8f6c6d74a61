"""Meshes, module patterns, and the one function that transforms the model."""

from shardyard.parallel.apply import apply_parallelism
from shardyard.parallel.compile import EAGER, Compilation, check_compiler
from shardyard.parallel.experts.routing import RoutingOptions, RoutingStats, build_routing
from shardyard.parallel.fsdp import Precision
from shardyard.parallel.gradients import GradientSums
from shardyard.parallel.meshes import Meshes, build_meshes
from shardyard.parallel.ownership import answers_for, beside, local
from shardyard.parallel.patterns import matches, select, select_modules
from shardyard.parallel.replicas import check_replicas

__all__ = [
    "EAGER",
    "Compilation",
    "GradientSums",
    "Meshes",
    "Precision",
    "RoutingOptions",
    "RoutingStats",
    "answers_for",
    "apply_parallelism",
    "beside",
    "build_meshes",
    "build_routing",
    "check_compiler",
    "check_replicas",
    "local",
    "matches",
    "select",
    "select_modules",
]
