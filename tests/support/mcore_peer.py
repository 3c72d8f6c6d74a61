"""megatron-core's own GPTModel on a CPU, in a process of its own: the judge of our Megatron-core folders.

Run as a script, because importing megatron.core sets environment variables and pulls in torch's inductor.
Jobs are plain values; each job's arrays come back in one file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch


def run_peer(jobs: list[dict[str, Any]], folder: Path) -> list[np.ndarray]:
    """Do the jobs in one process; the array that each one gives. ``folder`` takes the exchange files."""
    from support.peer_process import ask  # this file runs as a script too, where tests are not on the path

    arrays = ask(__file__, jobs, folder)
    return [arrays[str(number)] for number in range(len(jobs))]


def start_megatron() -> None:
    """One process as the whole of a Megatron run; what asks for a GPU is told there is none."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    tracker.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    moe_utils.te_general_gemm = None  # the name is missing where Transformer Engine is
    multi_latent_attention.HAVE_TE = False  # it takes Transformer Engine for there
    build = experts.GroupedMLP.__init__

    def build_in_fp32(self: Any, count: int, config: Any, *rest: Any, **named: Any) -> None:
        config = copy.copy(config)
        config.bf16 = True  # it insists on this for its kernel's sake; its parameters are of params_dtype
        build(self, count, config, *rest, **named)

    experts.GroupedMLP.__init__ = build_in_fp32
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = experts.gg.ops = GroupedGemm


class GroupedGemm:
    """The one function of the grouped_gemm package that GroupedMLP calls."""

    @staticmethod
    def gmm(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
        """Rows [T, K] in ``counts`` runs, each times its own of the matrices [E, K, N] -> [T, N]."""
        assert not trans_b
        runs = zip(rows.split(counts.tolist()), matrices, strict=True)
        return torch.cat([run @ matrix for run, matrix in runs])


class PlainAttention(torch.nn.Module):
    """Causal softmax attention; 0.16.1's own for the local spec does not take latent attention's sizes."""

    def __init__(self, config: Any, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> torch.Tensor:
        """[S, B, N, D], twice, and [S, B, N, V] -> [S, B, N x V]."""
        scores = torch.einsum("ibnd,jbnd->bnij", query, key) * self.scale
        scores = scores.masked_fill(attention_mask, float("-inf"))
        return torch.einsum("bnij,jbnv->ibnv", scores.softmax(-1), value).flatten(2)


def gpt_model(config: dict[str, Any], *, grouped: bool, mtp: int = 0) -> Any:
    """GPTModel with the local spec, its sizes taken from config.json."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    settings = transformer_config(config, grouped=grouped, mtp=mtp)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    if "kv_lora_rank" in config:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    behind = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False) if mtp else None
    return GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=int(config["rope_theta"]),
        rotary_percent=config.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        mtp_block_spec=behind,
    ).eval()


def transformer_config(config: dict[str, Any], *, grouped: bool, mtp: int) -> Any:
    """What config.json says, in megatron-core's words."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = config["model_type"]
    heads = config["num_attention_heads"]
    words: dict[str, Any] = dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim", config["hidden_size"] // heads),
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2" or config.get("attention_bias", False),
        qk_layernorm=kind.startswith("qwen3") or config.get("use_qk_norm", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        mtp_num_layers=mtp or None,
    )
    experts = config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        dense = config.get("first_k_dense_replace", 0)
        biased = kind in ("deepseek_v3", "glm4_moe")
        words |= dict(
            num_moe_experts=experts,
            moe_router_topk=config["num_experts_per_tok"],
            moe_ffn_hidden_size=config["moe_intermediate_size"],
            moe_grouped_gemm=grouped,
            moe_router_score_function="sigmoid" if biased else "softmax",
            moe_router_pre_softmax=not biased,
            moe_router_enable_expert_bias=biased,
            moe_router_topk_scaling_factor=config.get("routed_scaling_factor"),
            moe_router_load_balancing_type="none",
            # one number makes layers of one kind, which torch_dist stacks; a list makes single layers
            moe_layer_freq=[0] * dense + [1] * (config["num_hidden_layers"] - dense) if dense else 1,
            moe_token_dispatcher_type="allgather",
        )
        if config.get("norm_topk_prob") and not biased:  # softmax over the chosen ones = chosen ones, divided
            words |= dict(moe_router_pre_softmax=False)
        if config.get("n_shared_experts"):
            words["moe_shared_expert_intermediate_size"] = (
                config["moe_intermediate_size"] * config["n_shared_experts"]
            )
    if "kv_lora_rank" not in config:
        return TransformerConfig(**words)
    words |= dict(
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_type="rope",
        rotary_base=int(config["rope_theta"]),
        rotary_percent=1.0,
    )
    return MLATransformerConfig(**words)


def logits(job: dict[str, Any]) -> np.ndarray:
    """Load the one rank of ``folder`` into GPTModel, all of it, and run ``tokens`` [B, S] -> [B, S, V]."""
    path = Path(job["folder"]) / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)["model"]
    model = gpt_model(job["config"], grouped=job.get("grouped", False), mtp=job.get("mtp", 0))
    model.load_state_dict(state, strict=True)
    return forward(model, job["tokens"])


def forward(model: Any, ids: list[list[int]]) -> np.ndarray:
    tokens = torch.tensor(ids)
    length = tokens.shape[1]
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(length).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, hidden).numpy()


def save_torch_dist(job: dict[str, Any]) -> np.ndarray:
    """megatron-core's own checkpoint, in ``target``, of a GPTModel with the weights of ``folder``.

    As a training run would save it, with an optimizer's tensors and a random state (a pickle) beside them.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    path = Path(job["folder"]) / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    model = gpt_model(job["config"], grouped=job.get("grouped", False), mtp=job.get("mtp", 0))
    model.load_state_dict(saved["model"], strict=True)
    target = Path(job["target"])
    target.mkdir(parents=True)
    state = {"args": saved["args"], "checkpoint_version": 3.0, "iteration": 1}
    moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", torch.zeros(3))
    random = ShardedObject("rng_state", [{"np": np.arange(3)}], (1,), (0,))
    training = {**state, "optimizer": moments, "rng_state": random}
    dist_checkpointing.save({**training, "model": model.sharded_state_dict()}, str(target))
    return np.zeros(0)


def main(request: str, answer: str) -> None:
    """Do what the file ``request`` lists and save the arrays in ``answer``."""
    warnings.simplefilter("ignore")  # what megatron-core says about kernels that are not installed
    torch.set_num_threads(1)
    start_megatron()
    tasks = {"logits": logits, "save_torch_dist": save_torch_dist}
    jobs = json.loads(Path(request).read_text(encoding="utf-8"))
    np.savez(answer, **{str(number): tasks[job["do"]](job) for number, job in enumerate(jobs)})


if __name__ == "__main__":
    main(*sys.argv[1:])
