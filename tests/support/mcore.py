"""Tiny models as tensors by Hugging Face's names, worked out here from each family's published names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_LATENT = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 8,
}
_SHARED = {"moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
           "routed_scaling_factor": 1.0}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2,
                  "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, **_SHARED},
    "deepseek_v2": {**_LATENT, **_SHARED, "q_lora_rank": None},
    "glm4_moe": {**_SHARED, "head_dim": 8, "attention_bias": True, "use_qk_norm": True,
                 "partial_rotary_factor": 0.5},
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model of the family."""
    return {"model_type": family, **COMMON, **CONFIGS[family], **changes}


def shapes(config: Mapping[str, Any], *, mtp: int = 0) -> dict[str, tuple[int, ...]]:
    """All tensors of a model's files; ``mtp`` layers behind the last one."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"] + mtp):
        own = f"model.layers.{layer}."
        if layer >= config["num_hidden_layers"]:
            found |= {
                own + name: (hidden,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
            }
            found[own + "eh_proj.weight"] = (hidden, 2 * hidden)
            found[own + "embed_tokens.weight"] = found[own + "shared_head.head.weight"] = (vocabulary, hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}{norm}.weight"] = (hidden,)
        found |= {f"{own}self_attn.{name}": shape for name, shape in _attention(config).items()}
        found |= {own + name: shape for name, shape in _mlp(config, layer).items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        width, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
        query: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * width, hidden)}
        if rank:
            query = {"q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,),
                     "q_b_proj.weight": (heads * width, rank)}  # fmt: skip
        return query | {
            "kv_a_proj_with_mqa.weight": (kv + rope, hidden),
            "kv_a_layernorm.weight": (kv,),
            "kv_b_proj.weight": (heads * (config["qk_nope_head_dim"] + value), kv),
            "o_proj.weight": (hidden, heads * value),
        }
    dim = config.get("head_dim", hidden // heads)
    rows = {
        "q": heads * dim,
        "k": config["num_key_value_heads"] * dim,
        "v": config["num_key_value_heads"] * dim,
    }
    found: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (size, hidden) for part, size in rows.items()}
    found["o_proj.weight"] = (hidden, heads * dim)
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        found |= {f"{part}_proj.bias": (size,) for part, size in rows.items()}
        if config["model_type"] in ("llama", "qwen3", "qwen3_moe"):
            found["o_proj.bias"] = (hidden,)
    if config["model_type"].startswith("qwen3") or config.get("use_qk_norm"):
        found |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    return found


def _mlp(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, wide, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    if kind in ("llama", "qwen2", "qwen3") or layer < config.get("first_k_dense_replace", 0):
        return _gated("mlp.", ("gate_proj", "up_proj", "down_proj"), hidden, wide)
    if layer in config.get("mlp_only_layers", ()):
        return _gated("mlp.", ("gate_proj", "up_proj", "down_proj"), hidden, wide)
    found: dict[str, tuple[int, ...]] = {}
    if kind == "mixtral":
        count, width, room, parts = config["num_local_experts"], wide, "block_sparse_moe.", ("w1", "w3", "w2")
    else:
        count = config.get("num_experts") or config["n_routed_experts"]
        width, room, parts = config["moe_intermediate_size"], "mlp.", ("gate_proj", "up_proj", "down_proj")
    found[f"{room}gate.weight"] = (count, hidden)
    if kind in ("deepseek_v3", "glm4_moe"):
        found["mlp.gate.e_score_correction_bias"] = (count,)
    if config.get("n_shared_experts"):
        found |= _gated("mlp.shared_experts.", parts, hidden, width * config["n_shared_experts"])
    for expert in range(count):
        found |= _gated(f"{room}experts.{expert}.", parts, hidden, width)
    return found


def _gated(prefix: str, parts: tuple[str, ...], hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = parts
    return {f"{prefix}{gate}.weight": (wide, hidden), f"{prefix}{up}.weight": (wide, hidden),
            f"{prefix}{down}.weight": (hidden, wide)}  # fmt: skip


@dataclass
class DictWeights:
    """`Weights` over a dictionary."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    read_count: int = 0

    def __post_init__(self) -> None:
        self.facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        self.read_count += 1
        return self.tensors[name]


def random_weights(folder: Path, config: Mapping[str, Any], *, mtp: int = 0) -> DictWeights:
    """Every bit of every tensor is random (NaN and infinities too), so arithmetic of any kind would show.

    bf16, but the routers' bias is fp32, as published. MTP layers repeat embedding and head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes(config, mtp=mtp).items():
        dtype, bits = (
            (torch.float32, torch.int32)
            if "bias" in name and "gate" in name
            else (torch.bfloat16, torch.int16)
        )
        limit = torch.iinfo(bits)
        tensors[name] = torch.randint(limit.min, limit.max, shape, dtype=bits, generator=generator).view(
            dtype
        )
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + mtp):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors[head]
    return DictWeights(folder, config, tensors)


def counted_weights(folder: Path, config: Mapping[str, Any], *, mtp: int = 0) -> DictWeights:
    """All elements of the model numbered through, in fp32: each value says where it comes from."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, start = {}, 0
    for name, shape in shapes(config, mtp=mtp).items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    assert start < 1 << 24, "fp32 counts no further"
    return DictWeights(folder, config, tensors)


def differences(expected: Mapping[str, torch.Tensor], found: Any) -> list[str]:
    """Names of tensors that are missing, left over, or differ in shape, dtype or any bit."""
    wrong = [f"missing {name}" for name in expected if name not in found.facts]
    wrong += [f"left over {name}" for name in found.facts if name not in expected]
    for name, tensor in expected.items():
        if name in found.facts:
            read = found.read(name)
            said = (tuple(tensor.shape), tensor.dtype)
            if (
                found.facts[name] != said
                or (tuple(read.shape), read.dtype) != said
                or not same_bits(tensor, read)
            ):
                wrong.append(name)
    return wrong


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class Marker:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return open_marker, (str(self.path),)


def open_marker(path: str) -> None:
    Path(path).touch()
