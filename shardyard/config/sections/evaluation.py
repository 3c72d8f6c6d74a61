"""``evaluation``: benchmarks during training."""

from __future__ import annotations

from shardyard.config.sections.base import Section, setting


class EvaluationConfig(Section):
    """Benchmarks that the model in training is asked now and then, on the ranks that train it."""

    tasks: tuple[str, ...] | None = setting(
        None,
        "Benchmarks of choices by likelihood: mmlu, mmlu_ppl, cmmlu, ceval, boolq, hellaswag. Those with "
        "generated answers are for `shardyard evaluate`.",
        "按似然选择的评测任务：mmlu、mmlu_ppl、cmmlu、ceval、boolq、hellaswag。"
        "生成类任务请用 `shardyard evaluate`。",
    )
    task_data_path: str | None = setting(
        None,
        "The folder of the task's public files, or one with such a folder for each task, by its name.",
        "任务公开数据文件所在目录，或按任务名分子目录的目录。",
        path=True,
    )
    every: int | None = setting(
        None,
        "Steps between two times; null: only as at_start and at_end say.",
        "评测间隔步数；null 表示仅按 at_start、at_end。",
        ge=1,
    )
    at_start: bool = setting(False, "Before the first update too.", "第一步之前也评测。")
    at_end: bool = setting(True, "After the last update too.", "最后一步之后也评测。")
    limit: int | None = setting(
        None,
        "The first so many rows of each task (of each subject).",
        "每个任务（每个学科）只取前若干行。",
        ge=1,
    )
    num_fewshot: int | None = setting(
        None,
        "Examples that are shown; null: the benchmark's own number.",
        "少样本示例数；null 表示任务默认。",
        ge=0,
    )
    apply_chat_template: bool | None = setting(
        None,
        "Ask as a chat, by the training's template; null: not, since choices are scored as text goes on.",
        "按训练模板以对话形式提问；null 表示不使用，选项按文本续写计分。",
    )
