"""Megatron's options on a command line of the reference: which mean nothing here, and which contradict it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardyard.errors import UserError

SHAPE = {
    "--num-layers": ("num_hidden_layers",),
    "--hidden-size": ("hidden_size",),
    "--ffn-hidden-size": ("intermediate_size",),
    "--num-attention-heads": ("num_attention_heads",),
    "--num-query-groups": ("num_key_value_heads",),
    "--kv-channels": ("head_dim",),
    "--num-experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "--moe-router-topk": ("num_experts_per_tok",),
}
"""Option -> keys of config.json of which it repeats one."""
_REPEATED = (
    "--max-position-embeddings", "--seq-length", "--norm-epsilon", "--rotary-base", "--rotary-percent",
    "--normalization", "--position-embedding-type", "--rope-scaling-type", "--padded-vocab-size",
    "--make-vocab-size-divisible-by", "--vocab-size", "--spec", "--model-type-hf",
    "--moe-intermediate-size", "--moe-ffn-hidden-size", "--n-shared-experts", "--first-k-dense-replace",
    "--moe-layer-freq", "--moe-router-load-balancing-type", "--moe-router-score-function", "--q-lora-rank",
    "--kv-lora-rank", "--qk-rope-head-dim", "--qk-nope-head-dim", "--v-head-dim", "--qk-head-dim",
    "--qk-pos-emb-head-dim", "--moe-router-topk-scaling-factor", "--routed-scaling-factor",
    "--sliding-window", "--moe-shared-expert-intermediate-size",
)  # fmt: skip
"""With a value; the model's config.json says it."""
_IDLE = (
    "--micro-batch-size", "--global-batch-size", "--hidden-dropout", "--attention-dropout",
    "--init-method-std",
    "--tokenizer-type", "--distributed-backend", "--distributed-timeout-minutes", "--save", "--log-interval",
    "--eval-iters", "--eval-interval", "--save-interval", "--train-iters", "--tokenizer-padding-side",
    "--transformer-impl", "--moe-token-dispatcher-type", "--ckpt-format", "--log-throughput",
)  # fmt: skip
"""With a value; of no effect on answers here."""
_FLAGS = (
    "--use-mcore-models", "--disable-bias-linear", "--add-qkv-bias", "--group-query-attention", "--swiglu",
    "--use-fused-swiglu", "--use-fused-rmsnorm", "--use-rotary-position-embeddings", "--use-flash-attn",
    "--use-fused-rotary-pos-emb", "--untie-embeddings-and-output-weights", "--tokenizer-not-use-fast",
    "--no-gradient-accumulation-fusion", "--attention-softmax-in-fp32", "--no-load-optim", "--no-load-rng",
    "--no-save-optim", "--no-save-rng", "--no-masked-softmax-fusion", "--exit-on-missing-checkpoint",
    "--qk-layernorm", "--moe-grouped-gemm", "--moe-permutation-async-comm", "--moe-alltoall-overlap-comm",
    "--multi-latent-attention", "--use-distributed-optimizer", "--sequence-parallel", "--norm-topk-prob",
    "--shared-expert-gate", "--reuse-fp32-param", "--no-bias-dropout-fusion", "--no-bias-swiglu-fusion",
    "--no-shared-storage", "--use-glm-rope", "--reset-position-ids", "--npu-deterministic",
    "--no-check-for-nan-in-loss-and-grad", "--apply-query-key-layer-scaling", "--mla-mm-split",
    "--masked-softmax-fusion", "--no-position-embedding", "--no-rope-fusion", "--moe-router-pre-softmax",
)  # fmt: skip
_SHARED = "ranks share the model by tensor parallelism or FSDP here; leave it out"
_REFUSED = {
    "--pipeline-model-parallel-size": _SHARED,
    "--context-parallel-size": _SHARED,
    "--expert-model-parallel-size": _SHARED,
    "--expert-tensor-parallel-size": _SHARED,
    "--num-layers-per-virtual-pipeline-stage": "the folder says how it is cut; leave it out",
    "--num-layer-list": "the folder says how it is cut; leave it out",
    "--noop-layers": "convert such a folder first: shardyard convert ... --to hf --noop-layers",
    "--lora-load": "merge the adapter into the model first",
    "--lora-r": "merge the adapter into the model first",
    "--lora-alpha": "merge the adapter into the model first",
    "--lora-target-modules": "merge the adapter into the model first",
    "--load-in-4bit": "quantised weights are not read here",
    "--quant-states-dequantized": "quantised weights are not read here",
    "--inference-batch-times-seqlen-threshold": "batches form themselves here; leave it out",
    "--inference-max-requests": "batches form themselves here; leave it out",
    "--max-tokens-to-oom": "the memory is measured here; leave it out",
    "--cache-size": "the memory is measured here; leave it out",
    "--context-parallel-algo": _SHARED,
    "--use-deter-comp": "set the environment's CUBLAS_WORKSPACE_CONFIG; leave it out",
}
"""What is refused at values other than 1, and why."""


@dataclass(frozen=True)
class MegatronWords:
    """What a command line says in Megatron's words, and the words that are left."""

    left: list[str]
    shape: dict[str, int] = field(default_factory=dict)
    tp: int = 1
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    lines: tuple[str, ...] = ()
    """What is left out, for the user."""


def take_megatron_words(words: list[str]) -> MegatronWords:
    """Take Megatron's options out of ``words``, which are used up.

    Raises:
        UserError: those that would have no meaning here, all of them, each with what to do.
    """
    taken: dict[str, str | None] = {}
    refused: list[str] = []
    left: list[str] = []
    while words:
        name, equals, value = (word := words.pop(0)).partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words[0]
        if name in _FLAGS or name in ("--bf16", "--fp16"):
            taken[name] = None
        elif name in SHAPE or name in _REPEATED or name in _IDLE or name == "--tensor-model-parallel-size":
            if not value:
                raise UserError(f"{name} needs a value")
            taken[name] = value
            del words[: 0 if equals else 1]
        elif name in _REFUSED:
            del words[: 1 if value and not equals else 0]
            if value != "1":
                refused.append(f"{name}: {_REFUSED[name]}")
        else:
            left.append(word)
    if refused:
        raise UserError("; ".join(refused))
    if "--bf16" in taken and "--fp16" in taken:
        raise UserError("--bf16 and --fp16: give one of them")
    by_config = [name for name in taken if name in SHAPE or name in _REPEATED]
    idle = [name for name in taken if name in _IDLE or name in _FLAGS]
    return MegatronWords(
        left,
        {name: _number(name, taken[name]) for name in taken if name in SHAPE},
        _number("--tensor-model-parallel-size", taken.get("--tensor-model-parallel-size", "1")),
        "bf16" if "--bf16" in taken else "fp16" if "--fp16" in taken else "auto",
        tuple(_told("as the model's config.json says it", by_config) + _told("without effect here", idle)),
    )


def _number(name: str, value: str | None) -> int:
    if value is None or not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise UserError(f"{name} {value}: a whole number from 1 on is wanted")
    return int(value)


def _told(why: str, names: list[str]) -> list[str]:
    return [f"{why}: {' '.join(names)}"] if names else []
