"""Megatron-core checkpoint folders: written from, and read as, the tensors of a Hugging Face model.

``families`` says what a model holds, ``layout`` which rank has which layers, ``rules`` how a tensor is cut,
``pieces`` joins the three into one list of links per rank; ``write`` and ``read`` only follow that list.
"""

from __future__ import annotations

from shardyard.convert.mcore.discovery import Given
from shardyard.convert.mcore.families import FAMILIES, Family, Model, find_family
from shardyard.convert.mcore.layout import McoreLayout, parse_list
from shardyard.convert.mcore.read import McoreWeights
from shardyard.convert.mcore.torch_dist import TorchDistWeights, is_torch_dist, open_mcore
from shardyard.convert.mcore.write import Written, write_mcore

__all__ = [
    "FAMILIES",
    "Family",
    "Given",
    "McoreLayout",
    "McoreWeights",
    "Model",
    "TorchDistWeights",
    "Written",
    "find_family",
    "is_torch_dist",
    "open_mcore",
    "parse_list",
    "write_mcore",
]
