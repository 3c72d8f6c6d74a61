"""The loop, the step and the state of a run."""

from shardyard.train.run import run

__all__ = ["run"]
