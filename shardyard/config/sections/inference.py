"""``inference``: what the verbs after training read."""

from __future__ import annotations

from typing import Literal

from shardyard.config.sections.base import Section, setting


class InferenceConfig(Section):
    """Generation: what the verbs after training take where their own options say nothing."""

    infer_backend: Literal["huggingface", "vllm", "sglang"] = setting(
        "huggingface",
        "What generates: transformers, or vllm or sglang where they are installed.",
        "推理后端：transformers，或已安装的 vllm、sglang。",
    )
    max_new_tokens: int | None = setting(
        512,
        "Longest answer, in tokens; null: as generation_config.json says, else 512.",
        "回答的最大词元数；null 表示按 generation_config.json，否则为 512。",
        ge=1,
    )
    do_sample: bool | None = setting(
        None,
        "Draw tokens instead of taking the likeliest; null: as generation_config.json says. A temperature, "
        "top_p, top_k or min_p asks for it too.",
        "采样生成，而非取概率最大的词元；null 表示按 generation_config.json。设置 temperature、top_p、"
        "top_k 或 min_p 也表示采样。",
    )
    temperature: float | None = setting(
        None, "0 takes the likeliest token.", "采样温度；0 表示取概率最大的词元。", ge=0, le=100
    )
    top_p: float | None = setting(
        None, "Draw from the likeliest tokens up to this mass.", "核采样的累计概率。", gt=0, le=1
    )
    top_k: int | None = setting(
        None,
        "Draw from the likeliest K tokens; 0: from all.",
        "仅从概率最大的 K 个词元中采样；0 表示不限。",
        ge=0,
    )
    min_p: float | None = setting(
        None,
        "Draw from tokens of at least this share of the likeliest one's probability.",
        "仅保留概率不低于最大概率该比例的词元。",
        ge=0,
        le=1,
    )
    repetition_penalty: float | None = setting(
        None, "Above 1: fewer repeats.", "大于 1 时减少重复。", gt=0, le=100
    )
    num_beams: int | None = setting(
        None, "Search with so many beams (generate).", "束搜索的束数（generate）。", ge=1
    )
    seed: int | None = setting(
        None, "Of the drawn tokens; null: another one each time.", "采样的随机种子；null 表示每次不同。", ge=0
    )
    stop: tuple[str, ...] | None = setting(
        None, "Texts that end an answer and are cut off.", "遇到即结束回答的文本，本身不输出。"
    )
    system: str | None = setting(
        None, "System message of each chat that has none.", "没有系统消息的对话所用的系统消息。"
    )
    template: str | None = setting(
        None,
        "Chat template by name or file as in data.template, instead of the model's own.",
        "对话模板的名称或文件（同 data.template），取代模型自带的模板。",
    )
