"""Writes docs/arguments.md and its Chinese twin from the schema, and the tables of docs/parallelism.md.

``python -m shardyard.config.docs [FOLDER]``
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.explain import chinese, default_text, limits_text, type_text
from shardyard.config.later import LATER
from shardyard.config.parallelism_tables import refreshed
from shardyard.config.rules import show
from shardyard.config.schema import FIELDS, SECTIONS
from shardyard.config.suggest import MOVED

_ENGLISH_RULES = """\
# Arguments

<!-- Written by `python -m shardyard.config.docs`; change the schema, not this file. -->

A run is described by one YAML file with the sections below, and by words of the command line, which win
over the file. What neither names keeps its default. `shardyard check FILE` shows every value and where it
comes from; `shardyard check --explain training.lr` shows one setting; `shardyard schema` prints the JSON
schema for editors.

## On the command line

- `--section.key value`, `--section.key=value` and `section.key=value` mean the same; of several, the last
  wins.
- The YAML file is the word that ends in `.yaml` or `.yml`; it may stand anywhere.
- `--training.log_throughput` without a value is true. A list takes several words:
  `--parallel.fsdp_modules a b`.
- A mapping is written as JSON: `data.dataset='{"file_name": "train.jsonl"}'`. Lists and mappings are
  replaced whole.
- Keys are written whole; an unknown one is an error that names the nearest key.

## Values

- Numbers: `1e-5`, `.5`, `2E-4`, quoted or not. An integer may be written `5.0` or `1e3`. NaN and infinity
  are refused.
- Booleans: true/false, yes/no, on/off, t/f, y/n, 1/0 in any case. Where text is wanted, these words stay
  text.
- `null` (or `~`, or nothing) is null where the type allows it; the word `None` is read as null, with a
  warning. An empty text is null too, except for `data.default_system`.
- One value for a list is a list of one; an empty list is refused.
- `${NAME}` is an environment variable, `${NAME:-text}` has a default, `${training.output_dir}` is another
  setting; `$${` stands for the characters `${`.
- `~/` at the start of a path is the home folder. Relative paths begin at the current folder, not at the
  file's.
- A key written twice, an unknown key, a second YAML document and a tag (`!name`) are errors. Anchors and
  `<<` work.
"""

_CHINESE_RULES = """\
# 参数说明

<!-- 由 `python -m shardyard.config.docs` 生成；请修改 schema，不要修改本文件。 -->

一次运行由一个 YAML 文件（包含下列各节）和命令行参数描述；命令行优先于文件，两者都未给出的取默认值。
`shardyard check FILE` 显示每个值及其来源；`shardyard check --explain training.lr` 解释一个参数；
`shardyard schema` 输出供编辑器使用的 JSON schema。

## 命令行

- `--section.key value`、`--section.key=value`、`section.key=value` 含义相同；重复时以最后一个为准。
- 以 `.yaml` 或 `.yml` 结尾的词是配置文件，可放在任意位置。
- `--training.log_throughput` 不带值即为 true。列表可写多个词：`--parallel.fsdp_modules a b`。
- 映射用 JSON 书写：`data.dataset='{"file_name": "train.jsonl"}'`。列表和映射整体替换。
- 键必须写全；未知的键会报错，并提示最接近的键。

## 取值

- 数字：`1e-5`、`.5`、`2E-4`，是否加引号均可。整数可写作 `5.0` 或 `1e3`。不接受 NaN 和无穷大。
- 布尔值：true/false、yes/no、on/off、t/f、y/n、1/0，不分大小写。类型为文本时，这些词仍是文本。
- `null`（或 `~`，或留空）在类型允许时为空；单词 `None` 按 null 处理并给出警告。空文本也等于 null，
  `data.default_system` 除外。
- 列表参数只写一个值等于单元素列表；不接受空列表。
- `${NAME}` 引用环境变量，`${NAME:-text}` 带默认值，`${training.output_dir}` 引用其他参数；
  `$${` 表示字符 `${`。
- 路径开头的 `~/` 展开为主目录。相对路径以当前目录为准，而不是 YAML 所在目录。
- 重复的键、未知的键、第二个 YAML 文档和标签（`!name`）都是错误。支持锚点与 `<<`。
"""


@dataclass(frozen=True)
class _Language:
    rules: str
    moved: str
    header: str
    later: str
    later_values: str
    chinese: bool

    def meaning(self, path: str) -> str:
        return chinese(path) if self.chinese else FIELDS[path].description or ""


ENGLISH = _Language(
    rules=_ENGLISH_RULES,
    moved="- These keys may also stand in another section, as some files of the reference have them: {}.",
    header="| name | type | default | meaning |",
    later="*Later release.*",
    later_values="*{} in a later release.*",
    chinese=False,
)
CHINESE = _Language(
    rules=_CHINESE_RULES,
    moved="- 下列键也可以写在其他节中（参考实现的部分文件如此）：{}。",
    header="| 名称 | 类型 | 默认值 | 含义 |",
    later="*后续版本支持。*",
    later_values="*{} 在后续版本支持。*",
    chinese=True,
)


def render(language: _Language) -> str:
    """The whole page in one language."""
    moved = ", ".join(f"`{home}`" for home in sorted(MOVED.values()))
    parts = [f"{language.rules}{language.moved.format(moved)}\n"]
    for section, model in SECTIONS.items():
        if model.model_fields:
            rows = [_row(f"{section}.{key}", language) for key in model.model_fields]
            parts.append("\n".join([f"## `{section}`", "", language.header, "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _row(path: str, language: _Language) -> str:
    kind = type_text(path).replace("|", "\\|")
    limits = limits_text(path)
    meaning = language.meaning(path).replace("|", "\\|")
    if path in LATER:
        words = ", ".join(f"`{show(value)}`" for value in LATER[path].refused)
        meaning += " " + (language.later_values.format(words) if words else language.later)
    default = default_text(path).replace("|", "\\|")
    return f"| `{path.split('.')[1]}` | {kind}{f' ({limits})' if limits else ''} | `{default}` | {meaning} |"


def main(argv: list[str]) -> int:
    """Write the pages below the folder ``argv[0]``, by default ``docs``."""
    folder = Path(argv[0] if argv else "docs")
    for page, language in ((folder / "arguments.md", ENGLISH), (folder / "zh" / "arguments.md", CHINESE)):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(language), encoding="utf-8")
    page = folder / "parallelism.md"
    if page.exists():
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
