"""``inference`` and ``evaluation``: what the verbs after training read."""

from __future__ import annotations

from typing import Literal

from shardyard.config.sections.base import Section, setting


class InferenceConfig(Section):
    """Generation."""

    infer_backend: Literal["huggingface"] = setting(
        "huggingface", "What generates; transformers is the only one.", "推理后端，仅支持 transformers。"
    )
    max_new_tokens: int = setting(512, "Longest answer, in tokens.", "回答的最大词元数。", ge=1)
    do_sample: bool = setting(
        False, "Draw tokens instead of taking the likeliest.", "采样生成，而非取概率最大的词元。"
    )


class EvaluationConfig(Section):
    """Evaluation; it has no settings yet."""
