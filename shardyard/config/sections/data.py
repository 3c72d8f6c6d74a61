"""``data``: what is read, how rows become tokens and which of them are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from shardyard.config.sections.base import Section, setting

DatasetSpec = dict[str, Any] | tuple[str | dict[str, Any], ...] | str
"""One inline dataset entry, one name or path, or a list of either kind."""


class DataConfig(Section):
    """The training data."""

    template: str | None = setting(
        None,
        "Chat template: a name of docs/templates.md, or a template file (.yaml, .jinja). Null uses the "
        "tokenizer's own.",
        "对话模板：docs/templates.md 中的名称，或模板文件（.yaml、.jinja）。null 表示使用分词器自带的模板。",
    )
    dataset: DatasetSpec | None = setting(
        None,
        "What to train on: names of dataset_info.json, files, folders or globs (a list, or one text with "
        "commas), inline entries such as `{file_name: train.jsonl, formatting: sharegpt}`, or a list of "
        "both.",
        "训练数据：dataset_info.json 中的名称、文件、目录或通配符（列表或逗号分隔），"
        "内联条目，例如 `{file_name: train.jsonl, formatting: sharegpt}`，或两者的列表。",
        path=True,
    )
    eval_dataset: DatasetSpec | None = setting(
        None, "Data of the validation loss, given as `dataset` is.", "验证集，写法同 `dataset`。", path=True
    )
    dataset_dir: str = setting(
        "./configs/fsdp2/data",
        "Folder of dataset_info.json and the files it names; `ONLINE`: every name is a repository of the "
        "hub; "
        "`REMOTE:<repo>`: dataset_info.json lies in that repository.",
        "dataset_info.json 及其数据文件所在目录；`ONLINE`：名称均为 Hub 仓库；`REMOTE:<仓库>`："
        "dataset_info.json 位于该仓库。",
        path=True,
    )
    cutoff_len: int = setting(
        2048,
        "Longest sample, in tokens; longer rows are truncated, longer documents are split.",
        "样本最大词元数；过长的对话被截断，过长的文档被切分。",
        ge=1,
    )
    train_on_prompt: bool = setting(False, "Train the prompt's tokens too.", "提示部分也计入损失。")
    mask_history: bool = setting(False, "Train the last turn only.", "只训练最后一轮。")
    streaming: bool = setting(False, "Read rows while training instead of before it.", "训练时流式读取数据。")
    buffer_size: int = setting(
        16384,
        "Rows of a window in which a stream is shuffled (and packed).",
        "流式读取时打乱（及拼接）的窗口行数。",
        ge=1,
    )
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = setting(
        "concat", "How several datasets are joined.", "多个数据集的混合方式。"
    )
    interleave_probs: str | None = setting(
        None,
        "Shares of the interleaved datasets, as a comma list; null gives each the same.",
        "交错混合时各数据集的概率，逗号分隔；null 表示相等。",
    )
    overwrite_cache: bool = setting(
        False, "Tokenise again even if the cache holds the result.", "忽略缓存，重新分词。"
    )
    preprocessing_batch_size: int = setting(
        1000,
        "Rows that a preprocessing worker takes at a time, and samples of the window that packs are cut "
        "from.",
        "预处理每批行数，也是拼接的窗口样本数。",
        ge=1,
    )
    preprocessing_num_workers: int | None = setting(
        None,
        "Processes that tokenise. Null lets the program choose.",
        "分词进程数。null 表示自动选择。",
        ge=1,
    )
    max_samples: int | None = setting(
        None, "Use only the first N rows of each dataset.", "每个数据集只取前 N 行。", ge=1
    )
    eval_num_beams: int | None = setting(None, "Beams of generation in evaluation.", "评测生成的束宽。", ge=1)
    ignore_pad_token_for_loss: bool = setting(
        True, "Leave padding tokens out of the loss.", "填充词元不计入损失。"
    )
    val_size: int | float = setting(
        0.0,
        "Part of the data kept for validation: a share below 1, or a whole number of samples.",
        "留作验证的数据：小于 1 为比例，整数为样本数。",
        ge=0,
    )
    eval_on_each_dataset: bool = setting(
        False, "Report the validation loss of each dataset apart.", "分别报告各数据集的验证损失。"
    )
    packing: bool = setting(
        False,
        "Fill each sequence with several samples, which do not see each other.",
        "把多个样本拼接成一条序列，样本之间互不可见。",
    )
    neat_packing: bool = setting(
        False,
        "The same as packing: packed samples never see each other here.",
        "等同于 packing：拼接的样本互不可见。",
    )
    tool_format: str | None = setting(
        None,
        "How tools and calls are written, by a name of docs/templates.md; null takes the template's way.",
        "工具及其调用的书写格式（docs/templates.md 中的名称）；null 表示按模板。",
    )
    default_system: str | None = setting(
        None,
        "System message of samples that have none; the empty text means no system message.",
        "样本没有系统消息时使用的系统消息；空字符串表示不加系统消息。",
        keep_empty=True,
    )
    enable_thinking: bool | None = setting(
        True,
        "The template's thinking mode: true trains thoughts, false writes an empty one, "
        "null leaves samples as they are.",
        "模板的思考模式：true 训练思考内容，false 写入空思考，null 保持样本原样。",
    )
    tokenized_path: str | None = setting(
        None,
        "Folder of the tokenised data: read if it is there, written otherwise.",
        "分词结果目录：存在则读取，否则写入。",
        path=True,
    )
    data_shared_file_system: bool = setting(
        False,
        "All nodes see the same files, so the first rank of the run prepares the data for all.",
        "所有节点共享文件系统，由全局 0 号进程统一准备数据。",
    )
    data_manager_type: Literal["lf", "mg"] = setting(
        "lf",
        "lf reads conversations for fine-tuning, mg a token stream for pretraining.",
        "lf 读取对话用于微调，mg 读取词元流用于预训练。",
    )
    split: str = setting(
        "100,0,0",
        "Shares of the documents for training, validation and test (mg).",
        "文档划分为训练、验证、测试的比例（mg）。",
    )
    create_attention_mask_in_dataloader: bool = setting(
        False,
        "Refused: attention is told where documents end, so no mask matrix is made.",
        "不支持：注意力直接获知文档边界，无需掩码矩阵。",
    )
    no_shared_storage: bool = setting(
        False,
        "Nodes share no files, so each prepares the data; excludes data_shared_file_system.",
        "各节点不共享文件，分别准备数据；与 data_shared_file_system 互斥。",
    )
    dataloader_type: Literal["single"] = setting(
        "single", "Order of the stream; single is the only one.", "数据流的读取方式，仅支持 single。"
    )
    reset_attention_mask: bool = setting(
        False,
        "Attention of a pretraining window stops at a document's end; needs append_eod.",
        "预训练窗口内注意力不跨文档；需同时设置 append_eod。",
    )
    append_eod: bool = setting(
        False,
        "End each pretraining document with the end-of-document token.",
        "在每篇预训练文档末尾添加结束词元。",
    )
    cross_document_attention: bool = setting(
        False,
        "Packed samples see each other, as in the reference.",
        "拼接的样本互相可见（与参考实现一致）。",
    )
    index_compat: Literal["megatron"] | None = setting(
        None,
        "`megatron` gives the very samples that megatron-core gives for this seed (mg); null is ours, which "
        "keeps the last window and shuffles anew in each epoch.",
        "`megatron` 使样本与 megatron-core 同一种子完全一致（mg）；null 为本项目方式：保留最后的窗口，"
        "每轮重新打乱。",
    )
    on_bad_row: Literal["stop", "skip"] = setting(
        "stop",
        "At a row that cannot be read: stop with its file and line, or skip and count it.",
        "遇到无法读取的行：报出文件与行号并停止，或跳过并计数。",
    )

    @field_validator("dataset", "eval_dataset", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """One text with commas is a list; an empty mapping is nothing (the reference's rule)."""
        if isinstance(value, str) and "," in value:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return None if value == {} else value

    @property
    def dataset_names(self) -> list[str]:
        """The names, files, folders or globs that ``dataset`` holds in any of its forms."""
        named: Any = self.dataset.get("file_name") if isinstance(self.dataset, Mapping) else self.dataset
        return [named] if isinstance(named, str) else [name for name in named or () if isinstance(name, str)]
