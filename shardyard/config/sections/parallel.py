"""``parallel``: how the model is split over the ranks, and in which precision it computes."""

from __future__ import annotations

from typing import Literal

from shardyard.config.sections.base import Section, setting

LAYERS = ("model.layers.{*}",)
EXPERTS = ("model.layers.{*}.mlp.experts",)
DType = Literal["bf16", "fp16", "fp32"]


class ParallelConfig(Section):
    """Sizes of the meshes, module patterns, precision and memory."""

    tp_size: int = setting(1, "Ranks that share each tensor (tensor parallelism).", "张量并行数。", ge=1)
    fsdp_size: int | None = setting(
        None,
        "Ranks that share the parameters, context-parallel ranks included. Null takes all; "
        "fewer keep several replicas (HSDP).",
        "参数分片的卡数（含上下文并行）。null 表示全部；更小的值保留多个副本（HSDP）。",
        ge=1,
    )
    ep_size: int = setting(1, "Ranks that share the experts (expert parallelism).", "专家并行数。", ge=1)
    ep_fsdp_size: int = setting(
        1, "Ranks that shard each expert's parameters.", "每个专家参数的分片卡数。", ge=1
    )
    cp_size: int = setting(1, "Ranks that share a sequence (context parallelism).", "上下文并行数。", ge=1)
    cp_type: Literal["ulysses", "ring", "kvallgather"] = setting(
        "ulysses", "Method of context parallelism.", "上下文并行方式。"
    )
    recompute: bool | Literal["full", "selective"] = setting(
        False,
        "Compute activations again in the backward pass; true and full mean whole modules.",
        "反向时重新计算激活；true 与 full 表示整个模块重计算。",
    )
    fsdp_modules: tuple[str, ...] = setting(
        (*LAYERS, "model.embed_tokens", "lm_head"),
        "Patterns of the modules that are sharded as units.",
        "作为分片单元的模块匹配模式。",
    )
    ignored_modules: tuple[str, ...] | None = setting(
        None, "Patterns of the modules that are not sharded.", "不做分片的模块匹配模式。"
    )
    reshard_after_forward: bool = setting(
        True, "Free the gathered parameters of a module after its forward.", "前向后释放聚集的参数。"
    )
    shard_placement_fn: str | None = setting(
        None, "Rule that chooses the dimension a parameter is sharded on.", "选择参数分片维度的规则。"
    )
    efsdp_shard_placement_fn: str | None = setting(
        "shard_by_dim_1", "The same rule for experts.", "专家参数的分片维度规则。"
    )
    hook_modules: tuple[str, ...] = setting(
        LAYERS,
        "Owners of the hooks of the custom implementation; accepted.",
        "custom 实现的钩子所在模块（兼容保留）。",
    )
    fsdp_implementation: Literal["custom", "native"] = setting(
        "native", "Both names run the same code.", "两个名称执行同一实现。"
    )
    tp_colwise: tuple[str, ...] = setting(
        ("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"),
        "Linear layers split by output (tensor parallelism).",
        "张量并行中按列切分的线性层。",
    )
    tp_rowwise: tuple[str, ...] = setting(
        ("*.o_proj", "*.down_proj"),
        "Linear layers split by input (tensor parallelism).",
        "张量并行中按行切分的线性层。",
    )
    ep_modules: tuple[str, ...] = setting(
        EXPERTS, "Expert modules of expert parallelism.", "专家并行的专家模块。"
    )
    ep_fsdp_modules: tuple[str, ...] = setting(
        EXPERTS, "Expert modules whose parameters are sharded.", "参数分片的专家模块。"
    )
    ep_dispatcher: Literal["eager", "fused", "mc2"] = setting(
        "eager", "How tokens travel to their experts.", "词元分发到专家的方式。"
    )
    recompute_modules: tuple[str, ...] = setting(
        LAYERS, "Patterns of the modules that recompute.", "重计算的模块匹配模式。"
    )
    param_dtype: DType | None = setting(
        None,
        "Precision of the computation (weights are kept in fp32). "
        "Null is bf16 on an accelerator and fp32 on a CPU.",
        "计算精度（权重以 fp32 保存）。null 在加速卡上为 bf16，在 CPU 上为 fp32。",
    )
    reduce_dtype: DType = setting(
        "fp32", "Precision in which gradients are summed over ranks.", "跨卡梯度归约的精度。"
    )
    num_to_forward_prefetch: int = setting(
        1, "Modules gathered ahead in the forward pass; 0 is off.", "前向预取的模块数;0 表示关闭。", ge=0
    )
    num_to_backward_prefetch: int = setting(
        1, "Modules gathered ahead in the backward pass; 0 is off.", "反向预取的模块数;0 表示关闭。", ge=0
    )
    enable_chunk_batch: bool = setting(
        False, "Run modules over pieces of the micro-batch.", "把微批切块后逐块执行模块。"
    )
    chunk_mbs: int = setting(1, "Rows of such a piece.", "每块的行数。", ge=1)
    chunk_mbs_batch_dim: int = setting(0, "Dimension that is cut.", "切块的维度。")
    chunk_mbs_modules: tuple[str, ...] = setting(LAYERS, "Modules that run over pieces.", "切块执行的模块。")
    chunk_mbs_arg_indexs: tuple[int, ...] = setting(
        (0,), "Positional arguments that are cut.", "需切块的位置参数。"
    )
    chunk_mbs_kwarg_names: tuple[str, ...] = setting(
        ("position_embeddings", "position_ids", "attention_mask", "input_ids"),
        "Keyword arguments that are cut.",
        "需切块的关键字参数。",
    )
    cpu_offload: bool = setting(
        False,
        "Keep parameters, gradients and optimizer state in the host's memory.",
        "把参数、梯度和优化器状态放在主机内存。",
    )
