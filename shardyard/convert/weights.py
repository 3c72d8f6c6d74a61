"""What every conversion passes on: the weights of one model under the names that Hugging Face files use.

A reader opens a folder of some format as `Weights`; a writer takes `Weights` and makes a folder of another.
Names, shapes and dtypes are known before the first tensor is read, so files are planned first and then
filled one tensor at a time; nothing ever holds a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

Facts = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a whole tensor."""


class Weights(Protocol):
    """The tensors of one model, by the names of Hugging Face files: experts one by one, tied ones once.

    A reader is picklable: worker processes open files for themselves.
    """

    folder: Path
    config: Mapping[str, Any]
    """config.json of the model."""
    facts: Mapping[str, Facts]
    """All names, in the order in which they are read best: the embedding, layer 0, 1, ..., norm, head."""

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the host, contiguous, as stored.

        Raises:
            UserError: its file is missing, damaged or not what its header says.
        """
        ...
