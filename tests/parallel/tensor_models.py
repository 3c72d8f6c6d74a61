"""Tiny models of the families that tensor parallelism splits, and one accumulated step of them on any mesh.

The reference is the library's own model, one row at a time, without anything of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WORDS = 200  # a multiple of 2 and 4
Rows = list[tuple[list[int], list[int]]]

_COMMON: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
_MOE: dict[str, Any] = dict(
    moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(
    n_group=2, topk_group=1, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
    attention_bias=True,
)  # fmt: skip
_WINDOW: dict[str, Any] = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])

# (class of the config, what differs from _COMMON), by a name of its own.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("LlamaConfig", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama_bias": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True, num_attention_heads=8)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=False)),
    "qwen3": ("Qwen3Config", dict(head_dim=8, num_attention_heads=8)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]),
    ),
    "mistral": ("MistralConfig", dict(sliding_window=5)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "glm4": ("Glm4Config", dict(head_dim=8, attention_bias=True)),
    "glm4_moe": ("Glm4MoeConfig", _MOE | dict(head_dim=8, n_group=1, topk_group=1, use_qk_norm=True)),
    "deepseek_v3": ("DeepseekV3Config", _MOE | _LATENT | dict(q_lora_rank=24)),
    "deepseek_v3_no_q_lora": ("DeepseekV3Config", _MOE | _LATENT | dict(q_lora_rank=None)),
    "gpt_oss": ("GptOssConfig", _WINDOW | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2)),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", dict(residual_dropout=0.0, embedding_dropout=0.0)),
    "cohere2": ("Cohere2Config", _WINDOW | dict(logit_scale=0.25)),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "gemma3_text": ("Gemma3TextConfig", _WINDOW | dict(head_dim=8)),
}


def tensor_config(case: str, **changes: Any) -> Any:
    import transformers

    name, differences = CASES[case]
    return getattr(transformers, name)(**_COMMON | differences | changes)


def write_model(folder: Path, case: str, **changes: Any) -> Path:
    """Weights of which none is a neutral one: not the norms, biases, sinks or the router's correction."""
    import torch
    import transformers as hf

    config = tensor_config(case, **changes)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and "embed_scale" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(folder)
    return folder


def uneven_rows() -> Rows:
    """8 rows of 3 to 22 tokens. Labels are few, and none in the later half of the last rows: of some
    micro-batches, tp ranks hold slices without any. Row 2 has none at all.
    """
    rng = np.random.default_rng(7)
    rows = []
    for index, length in enumerate([5, 17, 9, 22, 3, 13, 20, 11]):
        ids = rng.integers(3, WORDS, length)
        ids[1] = 2  # the padding word, whose row of the embedding gets no gradient
        labels = np.append(ids[1:], -100)
        labels[: min(index, length - 2)] = -100
        if index == 2:
            labels[:] = -100
        if index >= 4:
            labels[length // 2 :] = -100
        rows.append((ids.tolist(), labels.tolist()))
    return rows


def reference_gradients(folder: Path, rows: Rows) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the whole batch by the library's own code, one row at a time."""
    import torch
    import torch.nn.functional as F
    import transformers as hf

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    count = sum(label != -100 for _, labels in rows for label in labels)
    total = 0.0
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        loss = F.cross_entropy(logits, torch.tensor(labels), reduction="sum", ignore_index=-100) / count
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def build(folder: Path, **options: Any) -> tuple[Any, Any]:
    """(model, meshes): the library's class, read and split on the ranks of the running group."""
    import torch
    import torch.distributed as dist
    import transformers as hf

    from shardyard.config import ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device
    from shardyard.models.causal_lm import Placement, base_class, trainable_class
    from shardyard.ops import DOCUMENTS_ATTENTION
    from shardyard.parallel import build_meshes

    parallel = ParallelConfig(**options)
    meshes = build_meshes(resolve_layout(parallel, dist.get_world_size()), "cpu")
    placement = Placement(parallel, meshes, Device("cpu"))
    base, config = base_class(hf.AutoConfig.from_pretrained(folder), str(folder), trust_remote_code=False)
    cls: Any = trainable_class(base, placement)
    model = cls.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=DOCUMENTS_ATTENTION,
        distributed_config=placement.distributed_config,
    )  # fmt: skip
    return model.train(), meshes


def micro_batches(rows: Rows, meshes: Any, accumulation: int) -> list[Rows]:
    mine = rows[meshes.dp_rank :: meshes.dp_size]
    size = -(-len(mine) // accumulation)
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def loss_sum(model: Any, rows: Rows) -> Any:
    """The summed loss of rows end to end."""
    import torch

    lens = tuple(len(ids) for ids, _ in rows)
    ids = torch.tensor([[token for ids, _ in rows for token in ids]])
    labels = torch.tensor([[label for _, labels in rows for label in labels]])
    positions = torch.cat([torch.arange(length) for length in lens])[None]
    return model(input_ids=ids, position_ids=positions, labels=labels, doc_lens=lens)


def split_gradients(
    folder: Path, rows: Rows, accumulation: int = 2, **options: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients on the ranks of the running group, accumulated over micro-batches."""
    import torch
    import torch.distributed as dist
    from support.training import whole

    from shardyard.parallel.gradients import GradientSums

    model, meshes = build(folder, **options)
    count = sum(label != -100 for _, labels in rows for label in labels)
    total = torch.zeros(())
    for piece in micro_batches(rows, meshes, accumulation):
        loss = loss_sum(model, piece) / count
        loss.backward()
        total += loss.detach()
    GradientSums(model.parameters(), meshes)()
    dist.all_reduce(total)
    grads = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return float(total) / meshes.layout.tp, grads
