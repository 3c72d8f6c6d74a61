"""``shardyard generate``: answers to prompts, streamed or into a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.cli.convert_options import count
from shardyard.cli.inference_options import (
    add_logprobs_option,
    add_model_options,
    add_sampling_options,
    asked_of,
    choice_of,
    parse_verb,
    verb_parser,
)
from shardyard.cli.inference_ranks import RANKS_HELP, run_verb, with_model
from shardyard.cli.jsonl_output import JsonlOutput
from shardyard.errors import UserError
from shardyard.infer.prompts import (
    Format,
    Row,
    Wanted,
    format_of,
    prompts_of_file,
    prompts_of_text,
    prompts_of_words,
)

if TYPE_CHECKING:
    from shardyard.infer.answers import Answer
    from shardyard.infer.model import Opened
    from shardyard.infer.opening import Choice
    from shardyard.infer.plan import Task

DESCRIPTION = """\
usage: shardyard generate --model PATH [--prompt TEXT ...] [--prompt-file FILE] [options]

Answers prompts: of the command line, of a file, or of standard input. A model with a chat template answers
as in a chat, unless --raw. One answer is written as it comes; several, or those with --logprobs, as JSON
lines in the order of the prompts, to --output or to standard output.
"""


@dataclass(frozen=True)
class Job:
    """What the words of the verb ask for."""

    choice: Choice
    wanted: Wanted
    prompts: tuple[str, ...]
    prompt_file: Path | None
    form: Format | None
    output: Path | None
    overwrite: bool
    max_running: int
    backend: str | None


def generate(argv: Sequence[str]) -> int:
    """Run the verb: 0, or 1 when a prompt could not be answered.

    Raises:
        UserError: a wrong option, prompt or model; nothing is written then.
    """
    return run_verb("generate", argv, read_generate, run_generate)


def read_generate(words: Sequence[str]) -> Job | None:
    """The job of the words; None when they asked for the help."""
    options = parse_verb(_parser(), words)
    if options is None:
        return None
    given = Path(options.prompt_file).expanduser() if options.prompt_file else None
    if given is not None and options.prompt:
        raise UserError("--prompt and --prompt-file: give one of them")
    if given is not None and not given.is_file():
        raise UserError(f"--prompt-file {given}: there is no such file")
    form = format_of(given, options.prompt_format) if given is not None else options.prompt_format
    if options.prompt and form:
        raise UserError("--prompt-format is for --prompt-file and standard input; leave it out with --prompt")
    output = Path(options.output).expanduser() if options.output else None
    if output is not None:
        JsonlOutput(output, overwrite=options.overwrite).check()
    elif options.overwrite:
        raise UserError("--overwrite is for --output; leave it out")
    wanted = Wanted(asked_of(options), options.n, options.raw, options.system, tuple(_tools(options.tools)))
    prompts_of_words(options.prompt or [])  # their faults come before the model is loaded
    return Job(
        choice_of(options), wanted, tuple(options.prompt or ()), given, form, output, options.overwrite,
        options.max_running, options.infer_backend,
    )  # fmt: skip


def _parser() -> Any:
    parser = verb_parser("generate", DESCRIPTION)
    parser.epilog = RANKS_HELP
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="FILE", help=".txt: a prompt a line; .jsonl: rows with prompt or messages")
    add(
        "--prompt-format", choices=["text", "lines", "jsonl"],
        help="how a file or standard input is read; text: as one prompt (default for standard input)",
    )  # fmt: skip
    add("--raw", action="store_true", help="go on from the prompt as it is, without the chat template")
    add("--system", metavar="TEXT", help="system message of each chat")
    add("--tools", metavar="FILE", help="JSON list of functions that the model may call, in OpenAI's form")
    add = parser.add_argument_group("answers").add_argument
    add("--output", metavar="FILE", help="a .jsonl file, complete or not there at all")
    add("--overwrite", action="store_true", help="replace that file")
    add("-n", type=count, default=1, metavar="N", help="answers to each prompt (default 1)")
    add("--num-beams", type=count, metavar="K", help="search with so many beams")
    add_logprobs_option(add)
    add("--max-running", type=count, default=32, metavar="N", help="answers at a time (default 32)")
    add_infer_backend(add)
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def add_infer_backend(add: Any) -> None:
    add(
        "--infer-backend", choices=["huggingface", "vllm", "sglang"],
        help="what generates (default: the run's `inference.infer_backend`, else huggingface)",
    )  # fmt: skip


def _tools(name: str | None) -> list[Any]:
    if name is None:
        return []
    try:
        found = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--tools {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--tools {name}: not JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise UserError(f"--tools {name}: a list of functions is wanted")
    return found


def run_generate(job: Job) -> int:
    """Answer the prompts, on every rank of the run."""
    backend = job.backend or _backend_of_run(job.choice)
    if backend == "huggingface":
        return with_model(job.choice, lambda opened: _answer(job, opened))
    from shardyard.cli.other_engines import generate_with

    writers: list[_Writer] = []

    def emit(tokenizer: Any) -> Any:
        writers.append(_Writer(job, tokenizer))
        return writers[0].take

    try:
        generate_with(backend, job.choice, lambda: _rows(job), job.wanted, emit)
        return writers[0].finish()
    finally:
        for writer in writers:
            writer.abandon()


def _backend_of_run(choice: Choice) -> str:
    from shardyard.infer.opening import find

    section = (find(choice).run or {}).get("inference") or {}
    return section.get("infer_backend") or "huggingface"


def _answer(job: Job, opened: Opened) -> int:
    from shardyard.infer.generate import generate as answer_all

    writer = _Writer(job, opened.tokenizer)
    try:
        answer_all(
            opened, lambda: _rows(job), job.wanted, writer.take, max_running=job.max_running,
            on_text=writer.stream if writer.streams else None,
        )  # fmt: skip
        return writer.finish()
    finally:
        writer.abandon()


def _rows(job: Job) -> list[Row]:
    if job.prompts:
        return prompts_of_words(job.prompts)
    if job.prompt_file is not None:
        return prompts_of_file(job.prompt_file, job.form or "lines")
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(
            "no prompt: give --prompt TEXT, --prompt-file FILE or standard input; to talk with the model run "
            "`shardyard chat`"
        )
    return prompts_of_text(sys.stdin.buffer.read(), job.form or "text", "standard input")


class _Writer:
    """Where answers go: a single one as text to standard output, others as JSON lines."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._output = JsonlOutput(job.output, overwrite=job.overwrite) if job.output else None
        of_jsonl = job.prompt_file is not None or job.form in ("jsonl", "lines")
        asked = job.wanted.asked
        single = len(job.prompts) <= 1 and job.wanted.n == 1 and asked.logprobs is None
        self._as_text = self._output is None and single and not of_jsonl
        self.streams = self._as_text
        self._streamed = False
        self._faults = 0

    def stream(self, text: str) -> None:
        self._streamed = True
        _print(text)

    def take(self, task: Task, answer: Answer, number: int) -> None:
        from shardyard.infer.records import record

        self._faults += answer.finish_reason == "error"
        if self._as_text:
            _print("\n" if self._streamed else f"{answer.text}\n")
            if answer.error:
                print(f"error: {task.row.where}: {answer.error}", file=sys.stderr)
            return
        line = _json(record(task, answer, self._tokenizer, number=number))
        if self._output is not None:
            self._output.write(line)
        else:
            _print(f"{line}\n")

    def finish(self) -> int:
        """All answers are there: the exit code."""
        if self._output is not None and self._output.is_begun:
            lines = self._output.finish()
            print(f"{self._output.path}: {lines} answers", file=sys.stderr)
        if self._faults and not self._as_text:
            print(f"{self._faults} prompts could not be answered: see their `error`", file=sys.stderr)
        return 1 if self._faults else 0

    def abandon(self) -> None:
        if self._output is not None:
            self._output.abandon()


def _print(text: str) -> None:
    """To standard output, at once."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # whoever read it has had enough
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # not to fail again at exit
        raise UserError(f"standard output: {error.strerror or error}") from error


def _json(row: Any) -> str:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair in a key that is only kept
        return json.dumps(row)
    return text
