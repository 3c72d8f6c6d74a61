"""What the families hold, as data: one table, and a model's sizes read through it.

Nothing else in this package knows a family's name. A new family is a new row, as long as its layers are made
of the parts that ``pieces`` knows: grouped or latent attention, gated MLPs, routed and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardyard.errors import UserError

Switch = bool | str
"""A fact of the family, or the key of config.json that decides it for a model."""


@dataclass(frozen=True)
class Experts:
    """Routed experts: where config.json counts them and what their tensors are called within a layer."""

    count_key: str
    router: str = "mlp.gate.weight"
    router_bias: str | None = None
    parts: tuple[str, str, str] = (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
        "mlp.experts.{expert}.down_proj.weight",
    )
    """Gate, up and down of one expert."""
    shared_key: str | None = None
    """The key that says how many experts all tokens share; they are stored as one MLP."""
    shared_parts: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    )


@dataclass(frozen=True)
class Family:
    """One row of the table; its key is config.json's ``model_type``."""

    reference_names: tuple[str, ...] = ()
    """What the reference's ``--model-type-hf`` calls it."""
    qkv_bias: Switch = False
    output_bias: Switch = False
    """A bias of o_proj."""
    qk_norm: Switch = False
    latent: bool = False
    """Attention is multi-head latent attention (MLA)."""
    experts: Experts | None = None
    mtp: bool = False
    """Layers behind the last one predict further tokens; their files repeat embedding and head."""


_DEEPSEEK = Experts("n_routed_experts", shared_key="n_shared_experts")
_DEEPSEEK_BIASED = replace(_DEEPSEEK, router_bias="mlp.gate.e_score_correction_bias")

FAMILIES: dict[str, Family] = {
    "llama": Family(("llama2",), qkv_bias="attention_bias", output_bias="attention_bias"),
    "qwen2": Family(("qwen25",), qkv_bias=True),
    "qwen3": Family(("qwen3",), qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True),
    "qwen3_moe": Family(
        ("qwen3-moe",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        experts=Experts("num_experts"),
    ),
    "mixtral": Family(
        ("mixtral",),
        experts=Experts(
            "num_local_experts",
            router="block_sparse_moe.gate.weight",
            parts=(
                "block_sparse_moe.experts.{expert}.w1.weight",
                "block_sparse_moe.experts.{expert}.w3.weight",
                "block_sparse_moe.experts.{expert}.w2.weight",
            ),
        ),
    ),
    "deepseek_v2": Family(("deepseek2", "deepseek2-lite"), latent=True, experts=_DEEPSEEK),
    "deepseek_v3": Family(("deepseek3",), latent=True, experts=_DEEPSEEK_BIASED, mtp=True),
    "glm4_moe": Family(
        ("glm45", "glm45-air"),
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=_DEEPSEEK_BIASED,
        mtp=True,
    ),
}


def find_family(name: str) -> tuple[str, Family]:
    """The row for a ``model_type`` or a ``--model-type-hf``.

    Raises:
        UserError: the table has no such row; the message lists what there is.
    """
    for model_type, family in FAMILIES.items():
        if name == model_type or name in family.reference_names:
            return model_type, family
    known = ", ".join(
        f"{model_type} ({', '.join(family.reference_names)})" for model_type, family in FAMILIES.items()
    )
    raise UserError(f"model_type {name!r} has no Megatron-core form here; there is one for {known}")


@dataclass(frozen=True)
class Model:
    """The sizes of one model."""

    family: Family
    model_type: str
    config: Mapping[str, Any]
    layers: int
    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int
    """Routed experts of a layer; 0 in a dense model."""

    @classmethod
    def of(cls, config: Mapping[str, Any], model_type: str | None = None) -> Model:
        """The model of a config.json; ``model_type`` overrides the one that it names.

        Raises:
            UserError: the family is not in the table, or a size is missing or no whole number above 0.
        """
        name = model_type or config.get("model_type")
        if not isinstance(name, str):
            raise UserError("config.json names no model_type; say which family it is")
        found, family = find_family(name)
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        experts = 0
        if family.experts is not None and config.get(family.experts.count_key):
            experts = _size(config, family.experts.count_key)
        return cls(
            family=family,
            model_type=found,
            config=config,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            groups=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", hidden // heads),
            vocabulary=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
        )

    def has(self, switch: Switch) -> bool:
        """Whether this model has what the family's fact says, or leaves to config.json."""
        return bool(self.config.get(switch, False)) if isinstance(switch, str) else switch

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has routed experts; layers behind the last one (MTP) have what the last has."""
        if not self.experts:
            return False
        layer = min(layer, self.layers - 1)
        if layer < int(self.config.get("first_k_dense_replace") or 0):
            return False
        if layer in (self.config.get("mlp_only_layers") or ()):
            return False
        if (layer + 1) % int(self.config.get("decoder_sparse_step") or 1):
            return False
        return layer % int(self.config.get("moe_layer_freq") or 1) == 0

    @property
    def has_shared_experts(self) -> bool:
        experts = self.family.experts
        return experts is not None and bool(experts.shared_key and self.config.get(experts.shared_key))

    @property
    def query_rank(self) -> int | None:
        """The width of the latent query; None where the query is projected at once."""
        rank = self.config.get("q_lora_rank")
        return int(rank) if rank else None

    def latent(self, key: str) -> int:
        """A size of latent attention (kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)."""
        return _size(self.config, key)

    @property
    def query_width(self) -> int:
        """Rows of a latent attention's whole query projection."""
        return self.heads * (self.latent("qk_nope_head_dim") + self.latent("qk_rope_head_dim"))


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}; a whole number above 0 is needed")
    return value
