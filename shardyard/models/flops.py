"""How many floating-point operations a training step needs, in closed form.

A multiplication and an addition count as two. What counts is what the mathematics needs, however it is
computed: matrix products with each token's weights (of experts the chosen ones), the head at labelled
positions, and in attention the pairs of a query and a key it may see, which for a causal document of n tokens
is n (n + 1) / 2. The backward needs each product twice. Recomputed activations, padding, logits that nobody
asked for and pairs behind a mask are work, but not counted. (The usual estimate, 6 N + 12 L H D n a token,
as in PaLM, arXiv:2204.02311, appendix B, takes the pairs behind the mask too, and N with the embedding.)
Element-wise operations, norms and rotary positions are left out, as is the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn as nn
from transformers import PreTrainedConfig, PreTrainedModel

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelFlops:
    """The sizes that the operations of a step follow from; made by `model_flops`.

    Attributes:
        body: weights that each token is multiplied with, the head's apart.
        head: weights that each labelled position is multiplied with.
        pair: operations of one query and one key in a layer: the score and the share of the value, all heads.
        windows: for each attention layer, how many keys a query sees at most; None: all before it.
    """

    body: int
    head: int
    pair: int
    windows: tuple[int | None, ...]

    def forward(self, doc_lens: Iterable[int], labelled: int) -> int:
        """Operations of a forward over documents of ``doc_lens`` tokens, ``labelled`` positions in all."""
        lengths = list(doc_lens)
        products = 2 * (self.body * sum(lengths) + self.head * labelled)
        return products + self.attention(lengths)

    def attention(self, doc_lens: Iterable[int]) -> int:
        """The forward's operations between queries and keys alone."""
        lengths = list(doc_lens)
        return self.pair * sum(visible_pairs(n, window) for window in self.windows for n in lengths)

    def training(self, doc_lens: Iterable[int], labelled: int) -> int:
        """Operations of a forward and a backward, where every weight is trained."""
        return 3 * self.forward(doc_lens, labelled)


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key it may see, in a causal document; each sees ``window`` keys at most."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def model_flops(model: PreTrainedModel) -> ModelFlops | None:
    """Read from a model's parameters (global shapes, so a sharded or a meta model will do) and its config.

    None for architectures whose operations do not follow from these alone: layers that are no softmax
    attention over a causal document, sparse attention with an indexer, convolutions.
    """
    config = model.config.get_text_config()
    windows = _windows(config)
    counted = _weights(model, config)
    if windows is None or counted is None or getattr(config, "index_topk", None):
        return None
    heads: int = config.num_attention_heads
    plain: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    score, value = plain, getattr(config, "v_head_dim", None) or plain
    if latent := getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        score = latent + config.qk_rope_head_dim
    body, head = counted
    return ModelFlops(body, head, 2 * heads * (score + value), windows)


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...] | None:
    if not getattr(config, "num_attention_heads", None) or getattr(config, "layers_block_type", None):
        return None
    layers = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    if not set(kinds) <= _KNOWN_LAYERS:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _weights(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[int, int] | None:
    """(weights of the body that a token meets, weights of the head)."""
    experts = next((count for name in _EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    output = model.get_output_embeddings()
    body = head = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or name.endswith("bias"):
                continue
            if module is output:
                head += parameter.numel()
            elif parameter.ndim == 2:
                body += parameter.numel()
            elif parameter.ndim == 3 and parameter.shape[0] == experts:
                body += parameter.numel() // parameter.shape[0] * config.num_experts_per_tok
            else:
                return None
    return body, head
