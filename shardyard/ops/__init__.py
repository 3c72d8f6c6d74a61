"""Named implementations of an operation, with their eager twins."""

from shardyard.ops.attention import NAME as DOCUMENTS_ATTENTION
from shardyard.ops.attention import documents_attention

__all__ = ["DOCUMENTS_ATTENTION", "documents_attention"]
