"""The reference's ``evaluation.py``: benchmarks by its own options, on any model that `shardyard` opens."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardyard.cli.convert_options import Parser, count, parse
from shardyard.cli.evaluate_tasks import TaskJob, run_tasks
from shardyard.cli.inference_options import whole
from shardyard.cli.inference_ranks import as_script
from shardyard.cli.megatron_words import MegatronWords, take_megatron_words
from shardyard.errors import UserError
from shardyard.evaluate.benchmarks import Benchmarks, require_lm_eval, task_names
from shardyard.evaluate.results import check_output
from shardyard.infer.opening import Choice

_REFUSED = {
    "--prompt-type": "name the template with `shardyard evaluate --template`, or train with it",
    "--repetition-penalty": "benchmarks' answers are judged as the model gives them",
}
DESCRIPTION = """\
evaluation.py --task NAME --task-data-path DIR --load MODEL --tokenizer-name-or-path DIR [options]

Benchmarks by the reference's options. `shardyard evaluate --tasks` does the same and more.
"""


def main(argv: Sequence[str]) -> int:
    """Run the script; its exit code."""
    return as_script(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    job = read(argv)
    return 0 if job is None else run_tasks(job)


def read(argv: Sequence[str]) -> TaskJob | None:
    """The job of the reference's options; None when the help has been printed.

    Raises:
        UserError: an option that is unknown or refused, or what a task lacks.
    """
    said = take_megatron_words(list(argv))
    try:
        options = parse(_parser(), said.left, _REFUSED)
    except SystemExit:
        return None
    _check(options)
    for line in said.lines if os.environ.get("RANK", "0") == "0" else ():
        print(line, file=sys.stderr)
    names = task_names(options.task)
    folders = [Path(path) for path in options.task_data_path or ()]
    if len(folders) not in (0, 1, len(names)):
        raise UserError(f"--task-data-path: {len(folders)} folders for {len(names)} tasks; name one for each")
    data = dict(zip(names if len(folders) > 1 else ("",), folders, strict=bool(folders[1:])))
    asked = Benchmarks(
        tasks=names, data=data, variant=_variant(options),
        chat=False if options.no_chat_template else None, limit=options.max_eval_samples,
        batch_size=options.evaluation_batch_size, language=options.eval_language or "", seed=options.seed,
        max_length=options.max_length, generation=_generation(options),
        allow_code=options.allow_code_execution, num_fewshot=options.num_fewshot,
    )  # fmt: skip
    if options.output:
        check_output(options.output)
    require_lm_eval()
    return TaskJob(_choice(options, said), asked, options.output)


def _check(options: argparse.Namespace) -> None:
    _check_template(options.instruction_template)
    if options.chain_of_thought and options.alternative_prompt:
        raise UserError("--chain-of-thought with --alternative-prompt: they are two ways to ask; leave one")
    if not options.task:
        raise UserError("--task: name what is asked, as mmlu or gsm8k")


def _check_template(template: str | None) -> None:
    """Only the order that all tasks have: examples, then the question."""
    if template is not None and not re.fullmatch(r"\s*\{fewshot_template\}\s*\{question\}\s*", template):
        raise UserError(
            f"--instruction-template {template!r}: examples come first and then the question; for another "
            "prompt write the task as lm-eval's YAML and name its folder: shardyard evaluate --task-path"
        )


def _variant(options: argparse.Namespace) -> str:
    if options.chain_of_thought:
        return "chain_of_thought"
    return "alternative_prompt" if options.alternative_prompt else ""


def _generation(options: argparse.Namespace) -> dict[str, float | int | bool]:
    """Answers are greedy, as the reference's are, unless a temperature is asked for."""
    found: dict[str, float | int | bool] = {}
    if options.max_new_tokens is not None:
        found["max_gen_toks"] = options.max_new_tokens
    if options.temperature is not None and options.temperature > 0:
        found |= {"do_sample": True, "temperature": options.temperature}
        found |= {"top_p": options.top_p} if options.top_p is not None else {}
        found |= {"top_k": options.top_k} if options.top_k else {}
    elif options.top_p is not None or options.top_k is not None:
        raise UserError("--top-p, --top-k: they choose among drawn tokens; say --temperature too")
    return found


def _choice(options: argparse.Namespace, said: MegatronWords) -> Choice:
    tokenizer, load = options.tokenizer_name_or_path, Path(options.load).expanduser()
    has_config = tokenizer is not None and (Path(tokenizer).expanduser() / "config.json").is_file()
    return Choice(
        options.load, tokenizer=tokenizer,
        config=tokenizer if has_config and not (load / "config.json").is_file() else None,
        dtype=said.dtype, parallel="tp" if said.tp > 1 else "none",
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _parser() -> Parser:
    parser = Parser(
        prog="evaluation.py", usage=argparse.SUPPRESS, description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--task", nargs="+", metavar="NAME", help="mmlu, mmlu_ppl, cmmlu, ceval, gsm8k, boolq, bbh, ...")
    add("--task-data-path", nargs="+", metavar="DIR", help="local copy of the set; one for each task")
    add("--load", required=True, metavar="PATH", help="a model: Megatron-core, DCP, Hugging Face or a run")
    add("--tokenizer-name-or-path", metavar="DIR", help="tokenizer, and config.json where the model has none")
    add("--evaluation-batch-size", type=count, default=1, metavar="N", help="answers at a time (default 1)")
    add("--max-eval-samples", type=count, metavar="N", help="the first N rows of each task")
    add("--no-chat-template", action="store_true", help="ask with the bare prompt")
    add("--eval-language", choices=["en", "zh"], help="of agieval and needlebench")
    add("--chain-of-thought", action="store_true", help="ask for the steps before the answer")
    add("--alternative-prompt", action="store_true", help="ask for an answer in words")
    add("--instruction-template", metavar="TEXT", help="only '{fewshot_template}{question}'")
    add("--max-new-tokens", type=count, metavar="N", help="longest answer; default: the task's")
    add("--max-length", type=count, metavar="N", help="tokens of prompt and answer together")
    add("--temperature", type=float, metavar="T", help="draw answers; greedy without it")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=whole, metavar="K")
    add("--seed", type=whole, default=0, metavar="N")
    add("--trust-remote-code", action="store_true", help="run the Python files of the model's folder")
    add("--broadcast", action="store_true", help="not needed: ranks that share a model always agree")
    add("--origin-postprocess", action="store_true", help="of no effect: answers are judged in one way")
    add("--use-kv-cache", action="store_true", help="always so")
    add("--hf-chat-template", action="store_true", help="always so, without --no-chat-template")
    add(
        "--tensor-model-parallel-size", type=count, default=1, metavar="N", help="above 1: ranks share layers"
    )
    add("--num-fewshot", type=whole, metavar="N", help="not the reference's: examples that are shown")
    add("--output", type=Path, metavar="FILE.json", help="not the reference's: where results go")
    add("--allow-code-execution", action="store_true", help="run the programs of human_eval, in a sandbox")
    return parser
