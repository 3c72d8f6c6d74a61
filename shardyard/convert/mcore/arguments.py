"""What a rank's file says about the model and its layout: the names of Megatron's arguments."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from shardyard.convert.mcore.pieces import Plan


def arguments_of(plan: Plan) -> Namespace:
    """Plain values of config.json, Megatron's own names for them, then the layout (REFERENCE 6.2)."""
    plain = {
        key: value
        for key, value in plan.model.config.items()
        if isinstance(value, int | float | str | list) and _is_plain(value)
    }
    return Namespace(**{**plain, **_model(plan), **_layout(plan)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | str)


def _model(plan: Plan) -> dict[str, Any]:
    model, config = plan.model, plan.model.config
    family = model.family
    values: dict[str, Any] = {
        "num_layers": plan.layout.positions(model),
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_query_groups": model.groups,
        "group_query_attention": model.groups != model.heads,
        "kv_channels": model.head_dim,
        "norm_epsilon": config.get("rms_norm_eps"),
        "rotary_base": config.get("rope_theta") or _nested(config, "rope_parameters", "rope_theta"),
        "padded_vocab_size": plan.layout.padded_vocabulary(model),
        "make_vocab_size_divisible_by": plan.layout.make_vocab_size_divisible_by or 1,
        "untie_embeddings_and_output_weights": not model.tied,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "add_qkv_bias": model.has(family.qkv_bias),
        "qk_layernorm": model.has(family.qk_norm) or family.latent,
        "multi_latent_attention": family.latent,
        "mtp_num_layers": plan.mtp_layers,
    }
    if family.latent:
        values["qk_head_dim"] = config.get("qk_nope_head_dim")
        values["qk_pos_emb_head_dim"] = config.get("qk_rope_head_dim")
    if model.experts:
        values |= {
            "num_experts": model.experts,
            "moe_router_topk": config.get("num_experts_per_tok"),
            "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config.get("intermediate_size"),
            "first_k_dense_replace": config.get("first_k_dense_replace") or 0,
        }
    return {key: value for key, value in values.items() if value is not None}


def _nested(config: Mapping[str, Any], outer: str, inner: str) -> Any:
    found = config.get(outer)
    return found.get(inner) if isinstance(found, Mapping) else None


def _layout(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    values = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_shards,
        "num_layers_per_virtual_pipeline_stage": layout.vpp,
        "vpp_size": layout.chunks(plan.model) if layout.has_chunks else None,
        "num_layer_list": ",".join(map(str, layout.num_layer_list)) if layout.num_layer_list else None,
        "noop_layers": ",".join(map(str, layout.noop_layers)) if layout.noop_layers else None,
        "moe_grouped_gemm": layout.grouped,
        "mla_mm_split": layout.mla_mm_split,
        "moe_tp_extend_ep": layout.moe_tp_extend_ep,
        "schedules_method": layout.schedules_method,
        "transformer_impl": layout.implementation,
    }
    return {key: value for key, value in values.items() if value is not None}
