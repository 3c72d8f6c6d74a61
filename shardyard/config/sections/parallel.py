"""``parallel``: how the model is split over the ranks, and in which precision it computes."""

from __future__ import annotations

from typing import Literal

from shardyard.config.sections.base import Section, setting

LAYERS = ("model.layers.{*}",)
EXPERTS = ("model.layers.{*}.mlp.experts",)
DType = Literal["bf16", "fp16", "fp32"]
Placement = Literal["shard_by_dim_0", "shard_by_dim_1"]
RecomputeMode = Literal["full", "selective", "none"]
Recomputed = Literal["linear", "attention", "experts"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "interleaved_zero_bubble", "dualpipe"
]


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
        1,
        "Ranks that shard each expert's parameters; 1 means what ep_size leaves of fsdp_size x tp_size.",
        "每个专家参数的分片卡数；1 表示 fsdp_size x tp_size 除以 ep_size 所得。",
        ge=1,
    )
    pp_size: int = setting(
        1,
        "Ranks of a pipeline, each with some of the layers (pipeline parallelism).",
        "流水线并行数：每个进程持有一部分层。",
        ge=1,
    )
    pp_schedule: Schedule = setting(
        "1f1b",
        "Order of the micro-batches in the pipeline; zero-bubble schedules are refused, see parallelism.md.",
        "流水线中微批的执行顺序；拒绝零气泡调度。",
    )
    pp_stages_per_rank: int | None = setting(
        None,
        "Stages that each pipeline rank holds. Null is 2 with interleaved_1f1b and 1 otherwise.",
        "每个流水线进程持有的阶段数。null 在 interleaved_1f1b 时为 2，否则为 1。",
        ge=1,
    )
    pp_layers_per_stage: tuple[int, ...] | None = setting(
        None,
        "Decoder layers of each stage, first to last. Null splits evenly, counting embedding and head.",
        "各阶段的层数（从前到后）。null 表示把嵌入层与输出层计入后平均切分。",
    )
    cp_size: int = setting(1, "Ranks that share a sequence (context parallelism).", "上下文并行数。", ge=1)
    cp_type: Literal["ulysses", "ring", "kvallgather"] = setting(
        "ulysses", "Method of context parallelism.", "上下文并行方式。"
    )
    recompute: bool | RecomputeMode = setting(
        False,
        "Compute activations again in the backward pass: true and full whole modules, selective all but "
        "matrix products and attention, false and none nothing. See memory.md.",
        "反向时重新计算激活：true 与 full 为整个模块；selective 保留矩阵乘与注意力的输出，其余重算；"
        "false 与 none 不重算。",
    )
    fsdp_modules: tuple[str, ...] = setting(
        (*LAYERS, "model.embed_tokens", "lm_head"),
        "Patterns of the modules that are sharded as units.",
        "作为分片单元的模块匹配模式。",
    )
    ignored_modules: tuple[str, ...] | None = setting(
        None, "Patterns of the modules that are not sharded.", "不做分片的模块匹配模式。"
    )
    reshard_after_forward: bool | int = setting(
        True,
        "Free the gathered parameters of a module after its forward. A number (2 or more, a divisor of "
        "fsdp_size) keeps them on so many neighbouring ranks, from which the backward pass gathers them.",
        "前向后释放聚集的参数。数字（不小于 2，且整除 fsdp_size）表示改为在相邻的这么多张卡上分片保留，"
        "反向时从这些卡聚集。",
        ge=0,
    )
    shard_placement_fn: Placement | None = setting(
        None,
        "Dimension on which a parameter is sharded; null is the first one.",
        "参数分片所沿的维度；null 表示第一维。",
    )
    efsdp_shard_placement_fn: Placement | Literal["auto"] = setting(
        "auto",
        "The same for experts (dimension 0 counts experts); auto takes the one that wastes least.",
        "专家参数的分片维度（第 0 维为专家数）；auto 选择浪费最少的维度。",
    )
    hook_modules: tuple[str, ...] = setting(
        LAYERS,
        "Refused when changed: each sharded unit carries its own hooks, whatever fsdp_implementation says.",
        "修改即拒绝：无论 fsdp_implementation 为何，每个分片单元自带钩子。",
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
    recompute_modules: tuple[str | dict[str, str], ...] = setting(
        LAYERS,
        "Patterns of the modules that recompute. An entry {pattern: ..., mode: full, selective or none} has "
        "a mode of its own; of several that match, the last counts.",
        "重计算的模块匹配模式。{pattern: ..., mode: full、selective 或 none} 形式的条目有自己的模式；"
        "多个匹配时以最后一个为准。",
    )
    recompute_operators: tuple[Recomputed, ...] | None = setting(
        None,
        "What selective recomputation computes again besides the cheap operators, which it always does; null "
        "is nothing.",
        "selective 模式下除廉价算子（总是重算）之外还要重算的算子；null 表示无。",
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
    activation_offload: bool = setting(
        False,
        "Keep what the backward pass needs of the blocks in the host's memory, fetched a block ahead.",
        "把反向所需的激活放在主机内存，反向时提前一个模块取回。",
    )
    activation_offload_modules: tuple[str, ...] = setting(
        LAYERS, "Patterns of those blocks.", "激活卸载的模块匹配模式。"
    )
    cpu_offload: bool = setting(
        False,
        "Keep parameters, gradients and optimizer state in the host's memory.",
        "把参数、梯度和优化器状态放在主机内存。",
    )

    @property
    def reshards_to(self) -> int | None:
        """The number of ranks that ``reshard_after_forward`` names, if it is one."""
        value = self.reshard_after_forward
        return None if isinstance(value, bool) or value < 2 else value

    @property
    def recompute_mode(self) -> RecomputeMode:
        """``recompute`` as a word."""
        if isinstance(self.recompute, bool):
            return "full" if self.recompute else "none"
        return self.recompute

    @property
    def recompute_modes(self) -> set[str]:
        """The modes that modules may have in this run; none at all without ``recompute``."""
        if self.recompute_mode == "none":
            return {"none"}
        entries = self.recompute_modules
        return {self.recompute_mode if isinstance(e, str) else e.get("mode", "") for e in entries}
