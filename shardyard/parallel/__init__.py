"""Meshes, module patterns, and the one function that transforms the model."""

from shardyard.parallel.apply import Precision, apply_parallelism
from shardyard.parallel.meshes import Meshes, build_meshes
from shardyard.parallel.patterns import matches, select, select_modules

__all__ = ["Meshes", "Precision", "apply_parallelism", "build_meshes", "matches", "select", "select_modules"]
