"""``data``: what is read, how rows become tokens and which of them are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from shardyard.config.sections.base import Section, setting

DatasetSpec = dict[str, Any] | tuple[str, ...] | str
"""One inline dataset entry, one name or path, or several of them."""


class DataConfig(Section):
    """The training data."""

    template: Literal["qwen3", "gpt", "empty"] | None = setting(
        None,
        "Chat template: qwen3, gpt or empty. Null uses the tokenizer's own.",
        "对话模板：qwen3、gpt 或 empty。null 表示使用分词器自带的模板。",
    )
    dataset: DatasetSpec | None = setting(
        None,
        "What to train on: names of dataset_info.json, files, folders or globs (a list, or one text with "
        "commas), or an inline entry such as `{file_name: train.jsonl, formatting: sharegpt}`.",
        "训练数据：dataset_info.json 中的名称、文件、目录或通配符（列表或逗号分隔），"
        "或内联条目，例如 `{file_name: train.jsonl, formatting: sharegpt}`。",
        path=True,
    )
    eval_dataset: DatasetSpec | None = setting(
        None, "Data of the validation loss, given as `dataset` is.", "验证集，写法同 `dataset`。", path=True
    )
    dataset_dir: str = setting(
        "./configs/fsdp2/data",
        "Folder of dataset_info.json and the files it names.",
        "dataset_info.json 及其数据文件所在目录。",
        path=True,
    )
    cutoff_len: int = setting(
        2048, "Longest sample, in tokens; longer ones are truncated.", "样本最大词元数；超出部分截断。", ge=1
    )
    train_on_prompt: bool = setting(False, "Train the prompt's tokens too.", "提示部分也计入损失。")
    mask_history: bool = setting(False, "Train the last turn only.", "只训练最后一轮。")
    streaming: bool = setting(False, "Read rows while training instead of before it.", "训练时流式读取数据。")
    buffer_size: int = setting(
        16384, "Rows of the buffer that a stream is shuffled in.", "流式读取的打乱缓冲区行数。", ge=1
    )
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = setting(
        "concat", "How several datasets are joined.", "多个数据集的混合方式。"
    )
    interleave_probs: str | None = setting(
        None, "Shares of the interleaved datasets, as a comma list.", "交错混合时各数据集的概率，逗号分隔。"
    )
    overwrite_cache: bool = setting(
        False, "Tokenise again even if the cache holds the result.", "忽略缓存，重新分词。"
    )
    preprocessing_batch_size: int = setting(
        1000, "Rows that a preprocessing worker takes at a time.", "预处理每批行数。", ge=1
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
    val_size: float = setting(
        0.0,
        "Part of the data kept for validation: a share below 1, or a number of rows.",
        "留作验证的数据：小于 1 为比例，否则为行数。",
        ge=0,
    )
    eval_on_each_dataset: bool = setting(
        False, "Report the validation loss of each dataset.", "分别报告各数据集的验证损失。"
    )
    packing: bool = setting(False, "Fill each sequence with several samples.", "把多个样本拼接成一条序列。")
    neat_packing: bool = setting(
        False, "Packing whose samples do not see each other.", "样本之间互不可见的拼接。"
    )
    tool_format: Literal["default", "qwen"] | None = setting(
        None,
        "How tools and calls are written; null takes the template's way.",
        "工具及其调用的书写格式；null 表示按模板。",
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
        "100,0,0", "Shares of the stream for training, validation and test.", "训练、验证、测试的划分比例。"
    )
    create_attention_mask_in_dataloader: bool = setting(
        False, "Make the attention mask matrix in the data loader.", "在数据加载器中生成注意力掩码。"
    )
    no_shared_storage: bool = setting(
        False, "Build the index of the stream on each node.", "在每个节点上分别构建索引。"
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
        "Packed documents see each other, as in the reference.",
        "拼接的文档互相可见（与参考实现一致）。",
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
