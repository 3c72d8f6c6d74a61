"""Model families, and what their own plans leave out."""

from __future__ import annotations

# Added to the family's own plan, in its notation; names that a model lacks are passed over.
_ATTENTION = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
ADAPTERS: dict[str, dict[str, str]] = {
    # Latent attention: heads begin behind the second projections; each rank computes what comes before.
    "deepseek_v3": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    },
    "gpt_oss": _ATTENTION,
}

# Parameters of an attention with one number per head, which the split heads take a slice of.
PER_HEAD = {"gpt_oss": ("sinks",)}

# Settings of a config that are dropout of a region's output: each rank would drop other elements of its
# partial sums.
DROPOUT_OF_PARTIAL_SUMS = ("residual_dropout",)
