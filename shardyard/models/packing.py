"""May the documents of a micro-batch share one forward of this architecture?

Some architectures leak from one document to the next whatever the attention does (linear attention, alibi,
...). So two conditions must hold: the family is on the list that was measured, and a self-test at start finds
two packed documents equal to each alone.
"""

from __future__ import annotations

from typing import Any

import torch

from shardyard.config.families import PACKED
from shardyard.models.probe import probing
from shardyard.ops import DOCUMENTS_ATTENTION

# These choose their frequencies from the longest position they see, so a document's numbers would depend on
# which others share its forward.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def refusal(config: Any) -> str | None:
    """Why this config's documents may not share a forward; None when they may (if the self-test agrees)."""
    if config.model_type not in PACKED:
        return f"{config.model_type} is not on the list of architectures measured to keep documents apart"
    if getattr(config, "alibi", False):
        return "alibi positions come from the mask"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    if by_length := _rope_types(config) & _ROPE_BY_LENGTH:
        return f"its rotary positions ({', '.join(by_length)}) follow from the longest position of a forward"
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    return f"its layers include {', '.join(sorted(other))}" if other else None


def attention_for(asked: str | None, config: Any) -> str | None:
    """The attention to build with: the one that is asked for; else that of documents, where they may share a
    forward, and the family's own (None) where not.
    """
    return asked or (None if refusal(config) else DOCUMENTS_ATTENTION)


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary scaling of a config, which has one set of parameters or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(found) for one in sets if (found := one.get("rope_type"))}


def leak(model: Any, *, vocab_size: int, device: torch.device) -> float:
    """The self-test: largest difference of packed and separate logits, relative to the largest logit.

    Two documents of 7 and 5 tokens. Every rank must call it, as each forward gathers parameters.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (1, 12), generator=generator).to(device)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].to(device)
    with probing(model):
        packed = model(input_ids=tokens, position_ids=positions, doc_lens=(7, 5)).float()
        first = model(input_ids=tokens[:, :7], position_ids=positions[:, :7], doc_lens=(7,)).float()
        second = model(input_ids=tokens[:, 7:], position_ids=positions[:, 7:], doc_lens=(5,)).float()
    alone = torch.cat([first, second], dim=1)
    return ((packed - alone).abs().max() / alone.abs().max().clamp_min(1e-12)).item()
