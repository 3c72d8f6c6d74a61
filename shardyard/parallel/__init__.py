"""Meshes, module patterns, and the one function that transforms the model."""

from shardyard.parallel.apply import apply_parallelism
from shardyard.parallel.fsdp import Precision
from shardyard.parallel.meshes import Meshes, build_meshes
from shardyard.parallel.patterns import matches, select, select_modules

__all__ = ["Meshes", "Precision", "apply_parallelism", "build_meshes", "matches", "select", "select_modules"]
