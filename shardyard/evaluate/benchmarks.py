"""Benchmarks on an opened model: read the data, ask the model through lm-eval, score.

Only rank 0 needs lm-eval and the data.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.errors import UserError, first_line
from shardyard.evaluate.results import Results, Score, TaskResult, pooled, score_of
from shardyard.evaluate.tasks import catalog
from shardyard.evaluate.tasks.copies import Part, read_copy, skipped_lines

if TYPE_CHECKING:
    from shardyard.device import ProcessGroup
    from shardyard.evaluate.crew import Crew
    from shardyard.infer.model import Opened

logger = logging.getLogger("shardyard.evaluate")


@dataclass(frozen=True)
class Benchmarks:
    """What is asked: tasks by our names or lm-eval's, and how."""

    tasks: tuple[str, ...]
    data: Mapping[str, Path] = field(default_factory=dict)
    """Task -> folder of its local copy; under "" that of tasks not named."""
    task_path: Path | None = None
    """A folder of lm-eval's YAML files."""
    num_fewshot: int | None = None
    variant: str = ""
    """chain_of_thought or alternative_prompt."""
    chat: bool | None = None
    """Whether prompts are chats; None: if the model has a chat template and was not only pretrained."""
    system: str | None = None
    limit: int | float | None = None
    """The first rows of each task: a number, or a share below 1."""
    batch_size: int = 8
    language: str = ""
    seed: int = 0
    max_length: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the tasks' generation settings."""
    allow_code: bool = False

    def settings(self) -> dict[str, Any]:
        """For the results' file."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "data"}
        told |= {"tasks": list(self.tasks), "task_path": self.task_path and str(self.task_path)}
        return {name: value for name, value in told.items() if value not in (None, "", {}, False)}


def require_lm_eval() -> None:
    """Raise a UserError, with the line that installs it, where lm-eval is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks: lm-eval is not installed; pip install 'shardyard[evaluate]'")


def read_parts(asked: Benchmarks) -> dict[str, list[Part]]:
    """Benchmark -> its local copy, for those of ours. Needs neither torch nor lm-eval.

    Raises:
        UserError: an unknown name where there is nothing else to look it up in, data that is missing or at
            fault, a way to ask that a benchmark does not have, or code that may not run.
    """
    found: dict[str, list[Part]] = {}
    for word in asked.tasks:
        name = catalog.name_of(word)
        if name is None or (asked.task_path is not None and _is_in(word, asked.task_path)):
            continue
        spec = catalog.load(name, variant=asked.variant)
        if spec.get("scorer") == "code" and not asked.allow_code:
            raise UserError(
                f"--tasks {word}: it runs code that the model writes, in a sandbox; allow that with "
                "--allow-code-execution"
            )
        folder = asked.data.get(word, asked.data.get(name, asked.data.get("")))
        if folder is None:
            raise UserError(f"--tasks {word}: say where its local copy is with --task-data-path FOLDER")
        found[word] = read_copy(spec["layout"], folder.expanduser(), name=name, language=asked.language)
    if asked.language and not any(catalog.name_of(word) in ("agieval", "needlebench") for word in found):
        raise UserError(f"--eval-language {asked.language}: agieval and needlebench alone have two languages")
    if asked.task_path is not None:
        _check_task_path(asked.task_path, allow_code=asked.allow_code)
    return found


def _is_in(word: str, folder: Path) -> bool:
    """Whether a file of the folder defines a task or group of that name."""
    pattern = re.compile(rf"^\s*(?:task|group|tag)\s*:\s*[\"']?{re.escape(word)}[\"']?\s*(?:#.*)?$", re.M)
    return any(pattern.search(text) for _, text in _yaml_texts(folder))


def _yaml_texts(folder: Path) -> list[tuple[Path, str]]:
    if not folder.expanduser().is_dir():
        raise UserError(f"--task-path {folder}: no such folder")
    paths = sorted(folder.expanduser().rglob("*.yaml"))
    return [(path, path.read_text(encoding="utf-8", errors="replace")) for path in paths]


def _check_task_path(folder: Path, *, allow_code: bool) -> None:
    texts = _yaml_texts(folder)
    if not texts:
        raise UserError(f"--task-path {folder}: no .yaml file there")
    for path, text in texts:
        for number, line in enumerate(text.split("\n"), 1):
            if "!function" in line.split("#")[0] and not allow_code:
                raise UserError(
                    f"{path}:{number}: !function runs Python of that folder; allow it with "
                    "--allow-code-execution"
                )


def run_benchmarks(
    opened: Opened,
    group: ProcessGroup,
    asked: Benchmarks,
    parts: Mapping[str, list[Part]],
    *,
    crew: Crew | None = None,
) -> Results | None:
    """The scores, on rank 0; the other ranks answer requests until all are done, and get None.

    ``parts`` is what `read_parts` gave, on rank 0; ``crew`` answers instead of one made for this call.

    Raises:
        UserError: a task that is unknown or cannot be asked in that way.
    """
    from shardyard.evaluate.crew import Crew

    crew = crew or Crew(opened, group, batch_size=asked.batch_size)
    if not group.is_main:
        crew.follow()
        return None
    started = time.monotonic()
    try:
        results = _lead(opened, crew, asked, parts)
    finally:
        crew.dismiss()
    results.seconds = time.monotonic() - started
    return results


def uses_chat(opened: Opened, wanted: bool | None) -> bool:
    """Whether prompts are chats.

    Raises:
        UserError: it is wanted and the model has no chat template.
    """
    has_template = bool(opened.tokenizer.chat_template)
    if wanted and not has_template:
        raise UserError("--chat-template: the model's tokenizer has none; name one with --template")
    stage = str(((opened.run or {}).get("training") or {}).get("stage"))
    return wanted if wanted is not None else has_template and stage not in ("pt", "pretrain")


def _lead(opened: Opened, crew: Any, asked: Benchmarks, parts: Mapping[str, list[Part]]) -> Results:
    require_lm_eval()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from shardyard.evaluate.ask import ask
    from shardyard.evaluate.chat_text import ChatText
    from shardyard.evaluate.harness import OpenedLM

    with_chat = uses_chat(opened, asked.chat)
    chat = ChatText(opened.tokenizer, opened.choice.enable_thinking) if with_chat else None
    lm = OpenedLM(
        opened, crew, chat, max_length=asked.max_length, seed=asked.seed, overrides=asked.generation
    )  # fmt: skip
    tasks, groups, left_out = _tasks(opened, asked, parts, with_chat)
    told = ask(lm, tasks, asked, with_chat=with_chat)
    by_name = {task.name: task for task in (_result(name, told, tasks[name]) for name in tasks)}
    ordered: list[TaskResult] = []
    for name, members in groups.items():
        of_group = [by_name.pop(member) for member in members if member in by_name]
        ordered += [pooled(name, of_group), *of_group] if len(of_group) > 1 else of_group
    ordered += by_name.values()
    settings = {**asked.settings(), "chat_template": with_chat, "max_length": lm.max_length}
    return Results(opened.name, settings, ordered, [*left_out, *_notes(lm)])


def _tasks(
    opened: Opened, asked: Benchmarks, parts: Mapping[str, list[Part]], with_chat: bool
) -> tuple[dict[str, Any], dict[str, list[str]], list[str]]:
    """Tasks by name, the members of each group, and what was left out."""
    from shardyard.evaluate.tasks.foreign import load_foreign
    from shardyard.evaluate.tasks.make import make_tasks
    from shardyard.evaluate.tasks.needle import hide

    tasks: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    left_out: list[str] = []
    for word in asked.tasks:
        name = catalog.name_of(word)
        if word not in parts or name is None:
            continue
        spec = catalog.load(name, variant=asked.variant, with_chat=with_chat)
        held = parts[word]
        if name == "needlebench":
            held = hide(held[0], opened.tokenizer, opened.context_length, asked.language)
        made = {task.config.task: task for task in make_tasks(name, spec, held, asked.num_fewshot)}
        tasks |= made
        groups[name] = list(made)
        left_out += skipped_lines(name, held)
    foreign = [word for word in asked.tasks if word not in parts]
    if foreign:
        more, members = load_foreign(foreign, asked.task_path, asked.num_fewshot, allow_code=asked.allow_code)
        tasks |= more
        groups |= members
    return tasks, groups, left_out


def _result(name: str, told: Mapping[str, Any], task: Any) -> TaskResult:
    """lm-eval's samples of a task as ours, with the scores made of them."""
    samples = [_sample(sample) for sample in told["samples"][name]]
    samples.sort(key=lambda sample: (sample["doc_id"], sample.get("filter", "")))
    stated, better = told["results"][name], told.get("higher_is_better", {}).get(name, {})
    scores: dict[str, Score] = {}
    for key, value in stated.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        own = [one for one in samples if one["filter"] == filtered and metric in one["metrics"]]
        shown = metric if filtered in ("none", "") else f"{metric},{filtered}"
        for one in own:
            one["metrics"].setdefault(shown, one["metrics"][metric])
        scores[shown] = score_of(
            shown, [one["metrics"][metric] for one in own], float(value),
            higher=bool(better.get(metric, True)),
        )  # fmt: skip
    return TaskResult(name, scores, int(task.config.num_fewshot or 0), samples)


def _sample(told: Mapping[str, Any]) -> dict[str, Any]:
    """One sample as it is kept for reading."""
    document = told["doc"] if isinstance(told["doc"], dict) else {}
    return {
        "doc_id": told["doc_id"],
        "where": document.get("where"),
        "prompt": told["arguments"][0][0],
        "continuations": [one[1] for one in told["arguments"] if isinstance(one[-1], str) and one[1:]],
        "target": told["target"],
        "answers": told["resps"],
        "filter": told["filter"],
        "metrics": {metric: _plain(told[metric]) for metric in told["metrics"]},
        "doc_hash": told["doc_hash"],
    }


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


def _notes(lm: Any) -> list[str]:
    """What a reader of the scores should know."""
    notes = []
    if lm.truncated:
        notes.append(
            f"{lm.truncated} prompts were longer than the model's context of {lm.max_length} tokens and were "
            "cut from the left"
        )
    if lm.empty_continuations:
        notes.append(f"{lm.empty_continuations} continuations were empty: their log-likelihood counts as 0")
    return notes


def task_names(words: Sequence[str]) -> tuple[str, ...]:
    """``--tasks a,b c``: the names, each once.

    Raises:
        UserError: none.
    """
    names = [name for word in words for name in word.split(",") if name]
    if not names:
        raise UserError(f"--tasks: name some of {', '.join(catalog.BENCHMARKS)}, or tasks of lm-eval")
    return tuple(dict.fromkeys(names))


def as_user_error(word: str, error: Exception) -> UserError:
    return UserError(f"--tasks {word}: {first_line(error)}")
