"""``optimization``: which operator implementations run."""

from __future__ import annotations

from typing import Literal

from shardyard.config.sections.base import Section, Switch, setting

RmsNorm = Literal["auto", "lean_linear", "lean", "torch", "liger", "npu"] | bool
Rotary = Literal["auto", "lean", "liger", "npu"] | bool
Attention = Literal["auto", "lean", "varlen", "flash_attn", "flex", "npu"] | bool
Experts = Literal["auto", "grouped_mm", "npu"] | bool
SwiGlu = Literal["auto", "lean_down", "lean", "liger", "npu"] | bool


def _switch(meaning: str, zh: str) -> Switch:
    return setting("auto", meaning, zh)


class OptimizationConfig(Section):
    """Operator switches: ``auto`` takes the fast one where it exists and passes its check."""

    use_fused_rmsnorm: RmsNorm = _switch(
        "Fused RMSNorm; see docs/operators.md.", "融合 RMSNorm，见 docs/operators.md。"
    )
    use_fused_swiglu: SwiGlu = _switch(
        "Fused gate and product of the gated MLP; see docs/operators.md.",
        "融合门控 MLP 的激活与乘积，见 docs/operators.md。",
    )
    moe_grouped_gemm: Experts = _switch(
        "Grouped matrix product of the experts; see docs/operators.md.",
        "专家分组矩阵乘，见 docs/operators.md。",
    )
    use_fused_rotary_pos_emb: Rotary = _switch(
        "Fused rotary position embedding; see docs/operators.md.",
        "融合旋转位置编码，见 docs/operators.md。",
    )
    use_flash_attn: Attention = _switch(
        "Fused attention of documents; see docs/operators.md.", "融合注意力，见 docs/operators.md。"
    )
    use_sparse_flash_attn: Switch = _switch("Sparse attention of the DSA families.", "DSA 系列的稀疏注意力。")
    use_fused_lightning_indexer: Switch = _switch(
        "Fused indexer of the DSA families.", "DSA 系列的融合索引器。"
    )
    use_fused_lightning_indexer_loss: Switch = _switch(
        "Fused indexer loss of the DSA families.", "DSA 系列的融合索引器损失。"
    )
    use_ascend_mhc: Switch = _switch(
        "Ascend operators of DeepSeek-V4's hyper-connections.", "DeepSeek-V4 超连接的昇腾算子。"
    )
    use_triton_swiglu_limit: Switch = _switch(
        "Triton SwiGLU with a limit, of DeepSeek-V4.", "DeepSeek-V4 的带限幅 Triton SwiGLU。"
    )
    use_triton_gdn: Switch = _switch("Gated delta rule in Triton.", "Triton 门控 delta 规则。")
    use_flash_gdn: Switch = _switch("Gated delta rule, fused.", "融合门控 delta 规则。")
    use_triton_rmsnormgated: Switch = _switch("Gated RMSNorm in Triton.", "Triton 门控 RMSNorm。")
    fix_router: bool = setting(
        False,
        "Send tokens to experts in a fixed order, for measuring speed only.",
        "固定的专家路由，仅用于测速。",
    )
    pre_tokens: int = setting(
        1048576, "Window of fused attention before a token.", "融合注意力的前向窗口。", ge=0
    )
    next_tokens: int = setting(0, "Window of fused attention after a token.", "融合注意力的后向窗口。", ge=0)
    gdn_chunk_size: int = setting(
        64, "Chunk length of the gated delta rule.", "门控 delta 规则的块长。", ge=1
    )
    compile: Literal["none", "block", "model"] = setting(
        "none",
        "torch.compile of each layer (block) or of the model's body (model). The first steps compile, which "
        "takes minutes.",
        "用 torch.compile 编译每一层（block）或模型主体（model）。最初几步用于编译，需数分钟。",
    )
    chunk_loss_size: int | None = setting(
        None,
        "Trained tokens whose logits exist at a time in the loss; null takes as many as fit a bound.",
        "计算损失时同时保留 logits 的训练词元数；null 表示在内存上限内取尽可能多。",
        ge=1,
    )
