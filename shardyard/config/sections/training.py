"""``training``: the run: steps, optimizer, schedule, saving, logging."""

from __future__ import annotations

from typing import Any, Literal

from shardyard.config.sections.base import Section, setting


class TrainingConfig(Section):
    """The run."""

    output_dir: str = setting(
        ...,
        "Folder of the run: checkpoints, metrics, the resolved config and the exported model.",
        "运行目录：检查点、指标、最终配置与导出的模型。",
        path=True,
    )
    deterministic: bool = setting(
        True, "Same numbers every time, at some cost in speed.", "确定性计算，速度略有下降。"
    )
    optimizer: Literal["adamw", "fused_adamw", "muon", "lion", "adam_mini"] = setting(
        "adamw",
        "The optimizer. adamw and fused_adamw are the same; muon is for hidden matrices, and AdamW for the "
        "rest.",
        "优化器。adamw 与 fused_adamw 相同；muon 用于隐藏层矩阵，其余参数用 AdamW。",
    )
    parameter_groups: tuple[dict[str, Any], ...] | None = setting(
        None,
        "Parameters with options of their own: a list of {patterns, lr or lr_scale, weight_decay}. A "
        "parameter goes by the first entry one of whose patterns its name matches.",
        "有单独设置的参数：{patterns, lr 或 lr_scale, weight_decay} 的列表。"
        "参数采用第一个与其名称匹配的条目。",
    )
    muon_momentum: float = setting(0.95, "Muon's momentum.", "Muon 的动量。", ge=0, lt=1)
    muon_nesterov: bool = setting(True, "Nesterov's form of Muon's momentum.", "Muon 使用 Nesterov 动量。")
    muon_ns_steps: int = setting(
        5,
        "Newton-Schulz steps that make a matrix orthogonal.",
        "矩阵正交化的 Newton-Schulz 步数。",
        ge=1,
        lt=100,
    )
    muon_ns_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Type of the Newton-Schulz products; bf16 is faster on an accelerator, and its results differ in the "
        "third digit with the number of ranks.",
        "Newton-Schulz 乘法的精度；bf16 在加速卡上更快，但结果的第三位有效数字随卡数变化。",
    )
    muon_scaling: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "What Muon multiplies lr by: 0.2 sqrt(max(rows, columns)), so that AdamW's lr serves, or "
        "sqrt(max(1, rows / columns)).",
        "Muon 的学习率系数：0.2 sqrt(max(行, 列))（可沿用 AdamW 的 lr），或 sqrt(max(1, 行 / 列))。",
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "int8", "int4"] = setting(
        "fp32",
        "Type of AdamW's two moments: 8 bytes a parameter in fp32, 4 in bf16 (rounded stochastically), about "
        "2 in int8 and 1 in int4 (in blocks; needs torchao). See memory.md.",
        "AdamW 两个动量的类型：fp32 每参数 8 字节；bf16（随机舍入）4 字节；int8 约 2 字节，int4 约 1 字节"
        "（分块量化，需要 torchao）。",
    )
    optimizer_in_backward: Literal["two_pass"] | bool = setting(
        False,
        "Update each parameter in the backward pass and free its gradient at once. true clips nothing; "
        "two_pass computes forward and backward twice, first for the norm. See memory.md.",
        "反向过程中更新每个参数并立即释放其梯度。true 不能裁剪；two_pass 前向与反向各算两次，先求范数。",
    )
    lion_beta1: float = setting(0.9, "Lion's beta 1.", "Lion 的 beta1。", ge=0, lt=1)
    lion_beta2: float = setting(0.99, "Lion's beta 2.", "Lion 的 beta2。", ge=0, lt=1)
    lr: float = setting(1e-5, "Peak learning rate.", "峰值学习率。", ge=0)
    weight_decay: float = setting(0.01, "Decoupled weight decay.", "解耦的权重衰减。", ge=0)
    adam_beta1: float = setting(0.9, "AdamW's beta 1.", "AdamW 的 beta1。", ge=0, lt=1)
    adam_beta2: float = setting(0.95, "AdamW's beta 2.", "AdamW 的 beta2。", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon.", "AdamW 的 epsilon。", gt=0)
    max_grad_norm: float = setting(
        1.0,
        "Gradients are scaled down to this global norm; 0 leaves them as they are.",
        "梯度裁剪的全局范数上限;0 表示不裁剪。",
        ge=0,
    )
    lr_scheduler_type: Literal[
        "cosine",
        "linear",
        "constant",
        "wsd",
        "cosine_with_restarts",
        "inverse_sqrt",
        "polynomial",
        "constant_with_warmup",
        "warmup_stable_decay",
        "cosine_with_min_lr",
    ] = setting(
        "cosine",
        "Course of the learning rate after warm-up. constant_with_warmup, warmup_stable_decay and "
        "cosine_with_min_lr are other names of constant, wsd and cosine.",
        "预热后的学习率曲线。constant_with_warmup、warmup_stable_decay、cosine_with_min_lr "
        "分别是 constant、wsd、cosine 的别名。",
    )
    lr_wsd_decay_ratio: float = setting(
        0.1,
        "Share of the updates, at the end, in which wsd falls from lr to min_lr; one at least.",
        "wsd 末尾从 lr 降至 min_lr 的步数占比，至少一步。",
        gt=0,
        le=1,
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "minus_sqrt", "exponential"] = setting(
        "linear", "How wsd falls.", "wsd 的下降方式。"
    )
    lr_num_cycles: int = setting(
        1,
        "Cycles of cosine_with_restarts; 1 is plain cosine.",
        "cosine_with_restarts 的周期数；1 即 cosine。",
        ge=1,
    )
    lr_power: float = setting(
        1.0, "Power of polynomial; 1 is linear.", "polynomial 的幂；1 即 linear。", gt=0
    )
    warmup_ratio: float = setting(
        0.03,
        "Share of the updates in which the rate rises to lr; unused with warmup_steps.",
        "学习率升至 lr 的预热步数占比；设置 warmup_steps 时不使用。",
        ge=0,
        lt=1,
    )
    min_lr: float = setting(
        1e-6,
        "Rate at the last update of every schedule that falls; the least one of inverse_sqrt.",
        "下降曲线最后一步的学习率；inverse_sqrt 的下限。",
        ge=0,
    )
    num_train_epochs: float = setting(
        3.0,
        "Passes over the data, fractions allowed; unused with max_steps.",
        "训练轮数，可为小数；设置 max_steps 时不使用。",
        gt=0,
    )
    max_steps: int = setting(-1, "Number of updates; -1 goes by epochs.", "更新步数;-1 表示按轮数。", ge=-1)
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches of an update, on each rank.", "每次更新的微批数（每卡）。", ge=1
    )
    disable_shuffling: bool = setting(False, "Keep the order of the data.", "保持数据原有顺序。")
    seed: int = setting(42, "Seed of everything that is drawn.", "随机种子。", ge=0)
    indexer_loss_coeff: float = setting(
        1.0, "Weight of the sparse-attention indexer's loss.", "稀疏注意力索引器损失的系数。", ge=0
    )
    router_aux_loss_coef: float = setting(
        0.0, "Weight of the experts' load-balancing loss.", "专家负载均衡损失的系数。", ge=0
    )
    router_bias_update_rate: float | None = setting(
        None,
        "Step of the routers' correction bias towards even load (DeepSeek-V3, GLM-4.5 and their kin). "
        "Null is 0.001 with stage pt and 0, which leaves it as it is, with sft.",
        "路由修正偏置每步的更新量（DeepSeek-V3、GLM-4.5 等）。"
        "null 在 pt 阶段为 0.001，在 sft 阶段为 0（不变）。",
        ge=0,
    )
    mtp_loss_scaling_factor: float = setting(
        0.3, "Weight of the multi-token prediction loss.", "多词元预测损失的系数。", ge=0
    )
    stage: Literal["pt", "sft"] = setting(
        "sft", "pt is pretraining, sft is supervised fine-tuning.", "pt 为预训练，sft 为有监督微调。"
    )
    calculate_per_token_loss: bool = setting(
        False,
        "Scale the loss by the number of trained tokens in the global batch; this is always done.",
        "按全局批次中参与训练的词元数缩放损失；总是如此。",
    )
    z_loss_coef: float = setting(
        0.0,
        "Weight of the square of a token's log-sum-exp, which keeps logits from drifting.",
        "每个词元 log-sum-exp 平方项的系数，抑制 logits 漂移。",
        ge=0,
    )
    label_smoothing: float = setting(
        0.0,
        "Share of a target's weight that is spread evenly over all words.",
        "从目标词均匀分给所有词的权重份额。",
        ge=0,
        lt=1,
    )
    save_steps: int = setting(
        500, "Updates between checkpoints; 0 or less is never.", "检查点间隔步数；≤0 表示不按步保存。"
    )
    save_epochs: int = setting(
        1, "Epochs between checkpoints; 0 is never.", "检查点间隔轮数;0 表示不按轮保存。", ge=0
    )
    save_total_limit: int | None = setting(
        3, "Checkpoints to keep; null or 0 keeps all.", "保留的检查点数；null 或 0 表示全部保留。"
    )
    save_only_model: bool = setting(
        False,
        "Leave the optimizer out of checkpoints; such a checkpoint cannot resume a run.",
        "检查点不含优化器；这样的检查点不能续训。",
    )
    save_async: bool = setting(
        False,
        "Write checkpoints while training goes on; a step waits only for the copy to the host's memory.",
        "训练继续的同时写检查点；训练只等待拷贝到主机内存。",
    )
    save_on_signal: bool = setting(
        True,
        "At SIGTERM or SIGUSR1 finish the step, save and exit with code 75, so that a preempted run loses "
        "nothing.",
        "收到 SIGTERM 或 SIGUSR1 时完成当前步、保存并以退出码 75 结束，抢占时不丢进度。",
    )
    on_save_error: Literal["stop", "continue"] = setting(
        "stop",
        "When a checkpoint cannot be written (disk full): end the run, or train on and try again at the next "
        "one.",
        "检查点无法写入（如磁盘已满）时：结束训练，或继续训练并在下次再试。",
    )
    save_hf_weights: bool = setting(
        True,
        "Export the trained model to output_dir in Hugging Face format.",
        "以 Hugging Face 格式将模型导出到 output_dir。",
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(
        None,
        "Floating-point type of the exported weights; null keeps each tensor's type in the model it came "
        "from.",
        "导出权重的浮点类型；null 表示沿用来源模型中各张量的类型。",
    )
    export_steps: int = setting(
        0,
        "Updates between exports during the run, each into its checkpoint's folder `hf`; 0 is never. A "
        "multiple of save_steps.",
        "训练中导出的间隔步数，写入相应检查点的 `hf` 目录;0 表示不导出。须为 save_steps 的倍数。",
        ge=0,
    )
    resume_force: bool = setting(
        False,
        "Resume although the data or its order is not that of the checkpoint (training goes on at the same "
        "count of samples in the new order), or the learning rate jumps.",
        "即使数据或其顺序与检查点不同（按新顺序从相同的样本计数处继续）或学习率跳变，也继续训练。",
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "A checkpoint folder `global_step_N` to go on from, or `latest` for the newest in output_dir.",
        "续训的检查点目录 `global_step_N`，或用 `latest` 取 output_dir 中最新的。",
        path=True,
    )
    logging_steps: int = setting(1, "Updates between log lines.", "日志间隔步数。", ge=1)
    log_throughput: bool = setting(False, "Log tokens per second.", "记录每秒词元数。")
    log_cpu_memory: bool = setting(False, "Log the host's memory.", "记录主机内存。")
    dataloader_num_workers: int = setting(
        0, "Processes of each rank that prepare batches.", "每卡的数据加载进程数。", ge=0
    )
    dataloader_prefetch_factor: int | None = setting(
        None, "Batches that each such process prepares ahead.", "每个加载进程预取的批数。", ge=1
    )
    dataloader_pin_memory: bool = setting(
        True, "Pin batches in memory for an accelerator.", "为加速卡锁页内存。"
    )
    dataloader_persistent_workers: bool = setting(
        False, "Keep those processes between epochs.", "轮次之间保留加载进程。"
    )
    dataloader_drop_last: bool = setting(
        False, "Drop an epoch's last, incomplete batch.", "丢弃每轮最后不足的批次。"
    )
    per_device_train_batch_size: int = setting(
        8, "Samples of a micro-batch, on each rank.", "每卡微批的样本数。", ge=1
    )
    max_tokens_per_micro_batch: int | None = setting(
        None,
        "Cut global batches into as few micro-batches as hold at most this many tokens each, balanced over "
        "ranks, instead of by per_device_train_batch_size (which then only counts in the size of the global "
        "batch). A longer sample has a micro-batch of its own. Null counts samples.",
        "按词元数切分全局批次：每个微批最多这么多词元，微批数尽量少，各卡负载均衡；此时 "
        "per_device_train_batch_size 只决定全局批次的大小。更长的样本独占一个微批。null 表示按样本数切分。",
        ge=1,
    )
    group_by_length: bool | None = setting(
        None,
        "Choose by length which samples of a global batch go to which rank and micro-batch, so that ranks "
        "have equal work; null does. false: in the order of training. The global batch holds the same "
        "samples, and its loss is the same.",
        "按长度决定全局批次内的样本分到哪张卡、哪个微批，使各卡工作量相等；null 即启用，false 按训练顺序。"
        "全局批次的样本与损失不变。",
    )
    profile: bool = setting(False, "Profile some steps.", "对部分步做性能分析。")
    profile_step_start: int = setting(0, "First profiled step.", "性能分析起始步。", ge=0)
    profile_step_end: int = setting(
        -1, "Step before which profiling ends; -1 is never.", "性能分析结束步（不含）;-1 表示不结束。", ge=-1
    )
    profile_ranks: tuple[int, ...] = setting(
        (-1,), "Ranks that are profiled; -1 is all.", "做性能分析的卡;-1 表示全部。"
    )
    profile_level: Literal["level_none", "level0", "level1", "level2"] = setting(
        "level0", "Detail of an NPU profile.", "NPU 性能分析级别。"
    )
    profile_export_type: Literal["text", "db"] = setting(
        "text", "Format of an NPU profile.", "NPU 性能数据格式。"
    )
    profile_data_simplification: bool = setting(
        False, "Keep only the summary of a profile.", "精简性能数据。"
    )
    profile_with_cpu: bool = setting(False, "Profile the CPU side too.", "同时分析 CPU。")
    profile_with_stack: bool = setting(False, "Record call stacks.", "记录调用栈。")
    profile_with_memory: bool = setting(False, "Record memory.", "记录内存。")
    profile_record_shapes: bool = setting(False, "Record tensor shapes.", "记录张量形状。")
    profile_save_path: str = setting("./profile", "Folder of profiles.", "性能数据目录。", path=True)
    warmup_steps: int | None = setting(
        None,
        "Updates in which the rate rises to lr: update k of W uses lr x k/W. Null goes by warmup_ratio.",
        "预热步数：第 k 步使用 lr x k/W。null 表示按 warmup_ratio。",
        ge=0,
    )
    decay_norm_and_bias: bool = setting(
        False, "Apply weight decay to norms and biases too.", "权重衰减也作用于归一化与偏置参数。"
    )
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "At a NaN or infinite loss or gradient: stop the run, or skip the update.",
        "损失或梯度为 NaN/Inf 时：停止训练，或跳过该步。",
    )
    fp16_initial_scale: float = setting(
        65536.0,
        "With param_dtype fp16: the factor on the loss at the first step, which then moves by itself.",
        "param_dtype 为 fp16 时损失的初始放大系数，之后自动调整。",
        gt=0,
        le=1e38,
    )
    fp16_growth_interval: int = setting(
        2000,
        "Steps without an overflow after which that factor grows.",
        "连续多少步无溢出后增大该系数。",
        ge=1,
    )
    fp16_growth_factor: float = setting(2.0, "What it is then multiplied by.", "增大时的倍数。", gt=1)
    fp16_backoff_factor: float = setting(
        0.5, "What it is multiplied by when gradients overflow.", "梯度溢出时乘以的倍数。", gt=0, lt=1
    )
    fp16_min_scale: float = setting(
        1.0,
        "The least that it falls to; an overflow there is treated by on_nonfinite.",
        "该系数的下限；在下限处溢出时按 on_nonfinite 处理。",
        gt=0,
    )
    overwrite_output_dir: bool = setting(
        False,
        "Move a run that is already in output_dir aside, to `<dir>.old-<time>`; nothing is deleted.",
        "output_dir 已有运行时，将其移到 `<dir>.old-<时间>`；不删除任何内容。",
    )
    eval_steps: int | None = setting(
        None,
        "Updates between validations; null validates at each epoch's end, and always at the run's end. Needs "
        "data.eval_dataset, data.val_size or a validation share in data.split.",
        "验证间隔步数；null 表示每轮结束时验证，训练结束时总会验证。需要 data.eval_dataset、data.val_size 或 "
        "data.split 中的验证份额。",
        ge=1,
    )
    eval_on_start: bool = setting(False, "Validate before the first update too.", "第一步之前也做验证。")
    per_device_eval_batch_size: int | None = setting(
        None,
        "Samples of a validation batch, on each rank; null cuts the sets as training's batches, by "
        "per_device_train_batch_size or max_tokens_per_micro_batch.",
        "每卡验证批的样本数；null 与训练相同：按 per_device_train_batch_size "
        "或 max_tokens_per_micro_batch 切分。",
        ge=1,
    )
    early_stopping_patience: int | None = setting(
        None,
        "Stop after this many validations in a row without a lower loss; null never stops early.",
        "连续多少次验证损失未下降后停止；null 表示不提前停止。",
        ge=1,
    )
    early_stopping_min_delta: float = setting(
        0.0,
        "What counts as lower: the loss must fall by more than this.",
        "损失下降超过该值才算改善。",
        ge=0,
    )
    keep_best_checkpoint: bool = setting(
        False,
        "Save a checkpoint at each lowest validation loss and keep the best one, named by checkpoints/best.",
        "验证损失创新低时保存检查点并保留最佳者，由 checkpoints/best 指明。",
    )
    load_best_model_at_end: bool = setting(
        False,
        "Export the weights of the best checkpoint rather than the last ones; needs keep_best_checkpoint.",
        "导出最佳检查点而非最后的权重；需同时设置 keep_best_checkpoint。",
    )
