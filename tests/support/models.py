"""Tiny random model folders in Hugging Face format, as a user would point a YAML at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 199  # not a multiple of any world size, so that shards are uneven
FAMILIES = ("qwen3", "qwen3_tied", "llama_tied", "qwen3_moe", "deepseek_v3", "glm4_moe")
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip

# Divides by four tensor-parallel ranks, and into four pipeline stages.
_PARITY = _COMMON | dict(vocab_size=200, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)


def tiny_config(family: str) -> Any:
    """The transformers config of one of FAMILIES: 2 or 3 layers, hidden 32, experts where it has some."""
    import transformers

    hf: Any = (
        transformers  # several keywords reach a config through **kwargs, which its signature does not show
    )
    match family:
        case "qwen3":
            return hf.Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=False)
        case "qwen3_tied":
            return hf.Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True)
        case "llama_tied":
            return hf.LlamaConfig(**_COMMON, tie_word_embeddings=True)
        case "qwen3_moe":
            return hf.Qwen3MoeConfig(
                **_COMMON, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
                norm_topk_prob=True, tie_word_embeddings=False,
            )  # fmt: skip
        case "deepseek_v3":
            common = _COMMON | dict(num_hidden_layers=3, num_key_value_heads=4)
            return hf.DeepseekV3Config(
                **common, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
                n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
                q_lora_rank=24,
                qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, tie_word_embeddings=False,
            )  # fmt: skip
        case "glm4_moe":
            common = _COMMON | dict(num_hidden_layers=3)
            return hf.Glm4MoeConfig(
                **common, head_dim=8, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
                n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
                tie_word_embeddings=False,
            )  # fmt: skip
        case "gpt_oss":
            return hf.GptOssConfig(
                **_COMMON | dict(intermediate_size=24), head_dim=8, num_local_experts=4,
                num_experts_per_tok=2, sliding_window=8, tie_word_embeddings=False,
            )  # fmt: skip
        case "parity_dense":
            return hf.Qwen3Config(**_PARITY, head_dim=8, tie_word_embeddings=True)
        case "parity_moe":
            return hf.Qwen3MoeConfig(
                **_PARITY, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
                norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False,
            )  # fmt: skip
        case _:
            raise ValueError(f"no tiny family {family!r}; there are {', '.join(FAMILIES)}")


def write_tiny_model(
    folder: Path, family: str, dtype: str = "float32", seed: int = 0, **overrides: Any
) -> Path:
    """Write config, weights and generation config of a random model into ``folder`` and return it.
    ``overrides`` change keys of its config.

    All weights are random (norms and the router's correction bias included), so that a mix-up of two tensors
    shows. They are in ``dtype``, but for the correction bias, which is float32 as in the published models.
    """
    import torch
    import transformers as hf

    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(family)
    for key, value in overrides.items():
        setattr(config, key, value)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.1 * noise if "norm" in name else 0.05 * noise)
    biases = {name: bias.clone() for name, bias in model.named_buffers() if "correction_bias" in name}
    model.to(getattr(torch, dtype))
    for name, bias in biases.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, bias)
    model.save_pretrained(folder)
    return folder


class ModelZoo:
    """Tiny model folders, each written once per session; read-only for the tests that share them."""

    def __init__(self, root: Path):
        self._root = root

    def folder(self, family: str, dtype: str = "float32") -> Path:
        folder = self._root / f"{family}-{dtype}"
        return folder if folder.exists() else write_tiny_model(folder, family, dtype)
