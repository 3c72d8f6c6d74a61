"""``model``: which model and tokenizer, and how its weights begin."""

from __future__ import annotations

from typing import Any, Literal

from shardyard.config.sections.base import Section, setting


class ModelConfig(Section):
    """The model and its tokenizer."""

    model_name_or_path: str = setting(
        ...,
        "A Hugging Face model folder, or the id of one on the hub; also a checkpoint folder `global_step_N` "
        "or a Megatron-core folder, of which the weights are taken.",
        "Hugging Face 模型目录或 hub 上的模型名；也可以是检查点目录 `global_step_N` 或 Megatron-core 目录，"
        "此时只取其权重。",
        path=True,
    )
    model_id: str | None = setting(
        None,
        "The model family; must agree with `model_type` in the model's config.json. Null takes that.",
        "模型族；须与模型 config.json 的 `model_type` 一致。null 表示直接取自该文件。",
    )
    init_model_with_meta_device: bool = setting(
        False,
        "Kept for the reference's files: the model is always built without memory and read shard by shard.",
        "为兼容参考配置而保留：模型总是在 meta 设备上构建，再逐分片读取权重。",
    )
    trust_remote_code: bool = setting(
        False, "Allow Python code that comes with the model to run.", "允许运行模型自带的 Python 代码。"
    )
    train_from_scratch: bool = setting(
        False,
        "Draw new weights from the seed instead of reading them; they are the same on any number of ranks.",
        "不读取权重，按随机种子重新初始化；结果与卡数无关。",
    )
    tokenizer_name_or_path: str | None = setting(
        None,
        "A tokenizer of its own: a folder or a hub id. Null takes the model's.",
        "单独指定的分词器目录或模型名。null 表示使用模型自带的分词器。",
        path=True,
    )
    config_name_or_path: str | None = setting(
        None,
        "Folder or hub id of the model's config.json, where the weights' folder has none. Null takes the "
        "model's.",
        "模型 config.json 所在目录或 hub 名，用于权重目录中没有它的情形。null 表示取模型自带的。",
        path=True,
    )
    cache_dir: str | None = setting(
        None,
        "Where downloads from the hub are kept. Null is the library's own folder.",
        "hub 下载内容的缓存目录。null 表示库的默认目录。",
        path=True,
    )
    use_fast_tokenizer: bool = setting(
        True, "Use the tokenizer's fast implementation.", "使用快速分词器实现。"
    )
    resize_vocab: bool = setting(
        False, "Resize the embeddings to the tokenizer's size.", "按分词器大小调整词表嵌入。"
    )
    split_special_tokens: bool = setting(
        False,
        "Treat special tokens inside the data's text as plain text.",
        "把数据文本中的特殊词元当作普通文本切分。",
    )
    add_tokens: str | None = setting(None, "Tokens to add, as a comma list.", "要添加的词元，逗号分隔。")
    add_special_tokens: str | None = setting(
        None, "Special tokens to add, as a comma list.", "要添加的特殊词元，逗号分隔。"
    )
    new_special_tokens_config: str | None = setting(
        None,
        "A YAML file that describes new special tokens in words.",
        "用文字描述新特殊词元的 YAML 文件。",
        path=True,
    )
    init_special_tokens: Literal["noise_init", "desc_init", "desc_init_w_noise"] = setting(
        "noise_init",
        "How embeddings of new tokens begin: noise, their description, or both.",
        "新词元嵌入的初始化方式：噪声、按描述，或两者结合。",
    )
    model_revision: str = setting(
        "main",
        "Branch, tag or commit of a hub model and its tokenizer.",
        "hub 模型及其分词器的分支、标签或提交号。",
    )
    hf_hub_token: str | None = setting(
        None, "Access token of the Hugging Face hub.", "Hugging Face hub 的访问令牌。"
    )
    ms_hub_token: str | None = setting(
        None, "Access token of the ModelScope hub.", "ModelScope hub 的访问令牌。"
    )
    om_hub_token: str | None = setting(None, "Access token of the Modelers hub.", "魔乐社区的访问令牌。")
    quant_recipe_name: Literal["mxfp8"] | None = setting(
        None, "Recipe of low-precision training.", "低精度训练方案。"
    )
    quant_apply_modules: tuple[str, ...] = setting(
        ("model.layers.{*}",), "Modules that the recipe converts.", "应用低精度方案的模块。"
    )
    quant_ignored_modules: tuple[str, ...] = setting(
        ("*lm_head", "*gate"), "Modules that the recipe leaves alone.", "低精度方案跳过的模块。"
    )
    quant_converters: tuple[str, ...] = setting(
        ("quantize.linear.mx",), "Converters that the recipe applies.", "低精度方案使用的转换器。"
    )
    enable_fsdp_low_precision_all_gather: bool = setting(
        True, "Gather weights in the recipe's precision.", "以低精度聚集权重。"
    )
    fsdp_low_precision_all_gather_mode: Literal["on-demand", "all"] = setting(
        "on-demand", "Which low-precision copies of a weight are gathered.", "聚集哪些低精度权重副本。"
    )
    attn_implementation: str | None = setting(
        None,
        "Attention implementation of transformers to use. Null chooses one for the device.",
        "transformers 的注意力实现。null 表示按设备自动选择。",
    )
    config_overrides: dict[str, Any] | None = setting(
        None,
        "Values that replace those of the model's config.json, such as `{num_hidden_layers: 4}`.",
        "替换模型 config.json 中的值，例如 `{num_hidden_layers: 4}`。",
    )
    freeze: tuple[str, ...] | None = setting(
        None,
        "Patterns of modules or parameters that are not trained.",
        "不参与训练的模块或参数的匹配模式。",
    )
