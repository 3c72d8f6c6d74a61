"""The part of ``shardyard evaluate`` that is about benchmarks: ``--tasks`` and ``--compare``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.cli.convert_options import Parser, count
from shardyard.cli.inference_options import choice_of, whole
from shardyard.errors import UserError
from shardyard.evaluate.benchmarks import Benchmarks, read_parts, require_lm_eval, task_names
from shardyard.evaluate.results import Results, check_output, metrics_of, table, write_results
from shardyard.infer.opening import Choice

_TASK_OPTIONS = (
    "task_data_path", "task_path", "num_fewshot", "chain_of_thought", "alternative_prompt", "chat_template",
    "system", "max_eval_samples", "evaluation_batch_size", "eval_language", "max_length", "temperature",
    "top_p", "top_k", "max_new_tokens", "allow_code_execution",
)  # fmt: skip
"""Options of no meaning without ``--tasks``."""


@dataclass(frozen=True)
class TaskJob:
    """``into_metrics``: the run's metrics.jsonl gets the scores too."""

    choice: Choice
    asked: Benchmarks
    output: Path | None
    into_metrics: bool = False


def add_task_options(parser: Parser, *, output: bool = False) -> None:
    """The options of benchmarks; ``output``: also those that the verb shares with the loss of data sets."""
    add = parser.add_argument_group("benchmarks (lm-eval: pip install 'shardyard[evaluate]')").add_argument
    add(
        "--tasks", action="append", nargs="+", metavar="NAME",
        help="mmlu, mmlu_ppl, cmmlu, ceval, gsm8k, boolq, bbh, agieval, human_eval, hellaswag, needlebench, "
        "or tasks of lm-eval",
    )  # fmt: skip
    add(
        "--task-data-path", action="append", metavar="[NAME=]DIR",
        help="the local copy of a benchmark's public files, or a folder of such copies",
    )  # fmt: skip
    add(
        "--task-path",
        type=Path,
        metavar="DIR",
        help="a folder of lm-eval's YAML, for tasks of your own",
    )
    add("--num-fewshot", type=whole, metavar="N", help="examples that are shown; default: the benchmark's")
    add("--chain-of-thought", action="store_true", help="ask for the steps before the answer")
    add("--alternative-prompt", action="store_true", help="ask for an answer in words, not by likelihood")
    add(
        "--chat-template", action=argparse.BooleanOptionalAction,
        help="ask as a chat; default: if the model has a chat template, and is not only pretrained",
    )  # fmt: skip
    add("--system", metavar="TEXT", help="system message of the chats, or what stands before each prompt")
    add(
        "--max-eval-samples", type=_limit, metavar="N", help="the first N rows of each task; below 1: a share"
    )
    add("--evaluation-batch-size", type=count, default=8, metavar="N", help="answers at a time (default 8)")
    add("--eval-language", choices=["en", "zh"], help="of agieval and needlebench")
    add("--max-length", type=count, metavar="N", help="tokens of prompt and answer; default: the model's")
    add("--temperature", type=float, metavar="T", help="draw answers; default: each task's, mostly greedy")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=whole, metavar="K")
    add("--max-new-tokens", type=count, metavar="N", help="longest answer; default: the task's")
    add("--task-seed", type=whole, default=0, metavar="N", help="of examples and drawn answers (default 0)")
    add(
        "--allow-code-execution", action="store_true",
        help="run the programs that human_eval's answers are, in a sandbox, and Python of --task-path",
    )  # fmt: skip
    add(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="two files of --output: are the differences more than chance?",
    )  # fmt: skip
    if output:
        add("--output", type=Path, metavar="FILE.json", help="where results go; samples go beside it")
        add("--into-metrics", action="store_true", help="also into the run's metrics.jsonl")


def _limit(text: str) -> int | float:
    """A whole number from 1 on, or a share between 0 and 1."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows, and no share below 1")
    return share


def is_about_tasks(options: argparse.Namespace) -> bool:
    """Whether the words ask for benchmarks.

    Raises:
        UserError: options of benchmarks without ``--tasks``.
    """
    if options.tasks:
        return True
    for name in _TASK_OPTIONS:
        value = getattr(options, name)
        if value not in (None, False) and not (name == "evaluation_batch_size" and value == 8):
            raise UserError(f"--{name.replace('_', '-')}: it is of benchmarks; name some with --tasks")
    return False


def read_tasks(options: argparse.Namespace) -> TaskJob:
    """The job of the options; what can be wrong with names, files and flags is found here, without torch.

    Raises:
        UserError: see `read_parts`; lm-eval is missing; results cannot be written.
    """
    if not options.model:
        raise UserError("--tasks: say which model with --model PATH")
    if options.chain_of_thought and options.alternative_prompt:
        raise UserError("--chain-of-thought with --alternative-prompt: they are two ways to ask; leave one")
    variant = "chain_of_thought" if options.chain_of_thought else ""
    generation = {
        "max_gen_toks": options.max_new_tokens, "temperature": options.temperature, "top_p": options.top_p,
        "top_k": options.top_k,
    }  # fmt: skip
    generation = {key: value for key, value in generation.items() if value is not None}
    if options.temperature:
        generation["do_sample"] = True
    asked = Benchmarks(
        tasks=task_names([word for words in options.tasks for word in words]),
        data=_data(options.task_data_path or ()), task_path=options.task_path,
        num_fewshot=options.num_fewshot,
        variant="alternative_prompt" if options.alternative_prompt else variant,
        chat=options.chat_template, system=options.system, limit=options.max_eval_samples,
        batch_size=options.evaluation_batch_size, language=options.eval_language or "",
        seed=options.task_seed, max_length=options.max_length, generation=generation,
        allow_code=options.allow_code_execution,
    )  # fmt: skip
    if options.output:
        check_output(options.output)
    require_lm_eval()
    return TaskJob(choice_of(options), asked, options.output, options.into_metrics)


def _data(words: Sequence[str]) -> dict[str, Path]:
    """``NAME=DIR`` and ``DIR``, which is for all other names."""
    found: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or "/" in name:
            name, path = "", word
        if name in found:
            raise UserError(f"--task-data-path {word}: {'that name' if name else 'a folder'} was given twice")
        found[name] = Path(path)
    return found


def run_tasks(job: TaskJob) -> int:
    """Score, print the table, write the files; on every rank."""
    from shardyard.allocator import tune_for_tensors
    from shardyard.cli.inference_ranks import convert_to_hf, log_to_stderr

    log_to_stderr()
    tune_for_tensors()
    from transformers.utils import logging as transformers_logging

    from shardyard.device import detect_device, start_process_group
    from shardyard.evaluate.benchmarks import run_benchmarks
    from shardyard.evaluate.opening import open_for_tasks

    transformers_logging.set_verbosity_error()
    device = detect_device()
    group = start_process_group(device)
    try:
        parts = read_parts(job.asked) if group.is_main else {}
        opened = open_for_tasks(job.choice, group, device, convert=convert_to_hf)
        if job.into_metrics and (opened.found.run_dir is None or opened.found.step is None):
            raise UserError("--into-metrics: the model is not a checkpoint of a run")
        results = run_benchmarks(opened, group, job.asked, parts)
        if results is not None:
            _tell(job, results, opened.found.run_dir, opened.found.step)
    except UserError:
        group.leave_together()
        raise
    group.stop()
    return 0


def _tell(job: TaskJob, results: Results, run_dir: Path | None, step: int | None) -> None:
    for line in table(results):
        print(line)
    if job.output:
        write_results(results, job.output)
        print(f"results: {job.output}, and each sample beside it")
    if job.into_metrics and run_dir is not None:
        from shardyard.monitor.metrics import METRICS_FILE, MetricsWriter

        writer = MetricsWriter(run_dir / METRICS_FILE)
        writer.write_benchmarks(step or 0, metrics_of(results))
        writer.close()


def compare_files(first: Path, second: Path) -> int:
    """``--compare A B``: the table of differences."""
    from shardyard.evaluate.compare import LEVEL, compare, compared_lines

    found = compare(first.expanduser(), second.expanduser())
    print(f"A: {first}\nB: {second}")
    for line in compared_lines(found):
        print(line)
    chance = f"about {LEVEL * len(found):.1f} of {len(found)} comparisons would be by chance"
    print(f"significant: p below {LEVEL}; {chance}")
    return 0
