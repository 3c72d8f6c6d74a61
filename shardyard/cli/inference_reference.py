"""The reference's ``inference.py``, its entry for Megatron models, with its own options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardyard.cli.convert_options import Parser, count, parse
from shardyard.cli.inference_options import number, whole
from shardyard.cli.inference_ranks import as_script, with_model
from shardyard.cli.megatron_words import SHAPE, MegatronWords, take_megatron_words
from shardyard.errors import UserError
from shardyard.infer.asked import Asked
from shardyard.infer.opening import Choice
from shardyard.infer.prompts import Wanted, prompts_of_words

if TYPE_CHECKING:
    from shardyard.infer.model import Opened

TASKS = ("greedy", "do_sample", "beam_search", "beam_search_with_sampling", "chat")
QUESTION = "how are you?"
"""What the reference always asks in tasks other than chat."""
_DESCRIPTION = """\
[torchrun --nproc_per_node N] inference.py --load DIR --tokenizer-name-or-path DIR --task greedy chat ...

Answers with the model in DIR (Megatron-core, Hugging Face, a run, a checkpoint), by the tasks in turn.
`shardyard generate` and `shardyard chat` do more.
"""


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    options: argparse.Namespace
    choice: Choice
    said: MegatronWords


def main(argv: Sequence[str]) -> int:
    """Run the script; its exit code."""
    return as_script(lambda: _run_words(argv))


def _run_words(argv: Sequence[str]) -> int:
    job = read(argv)
    if job is None:
        return 0
    for line in job.said.lines if os.environ.get("RANK", "0") == "0" else ():
        print(line, file=sys.stderr)
    return with_model(job.choice, lambda opened: run(job, opened))


def read(argv: Sequence[str]) -> Job | None:
    """The job of a command line; None when it asked for the help.

    Raises:
        UserError: an option that is unknown, or refused with the reason.
    """
    said = take_megatron_words(list(argv))
    try:
        options = parse(_parser(), said.left)
    except SystemExit:
        return None
    if options.hf_chat_template and options.prompt_type:
        raise UserError("--hf-chat-template and --prompt-type: give one of them")
    tokenizer, load = options.tokenizer_name_or_path, Path(options.load).expanduser()
    has_config = tokenizer is not None and (Path(tokenizer).expanduser() / "config.json").is_file()
    config = tokenizer if has_config and not (load / "config.json").is_file() else None
    return Job(
        options,
        Choice(
            options.load, tokenizer=tokenizer, config=config, dtype=said.dtype, template=options.prompt_type,
            trust_remote_code=options.trust_remote_code, parallel=_parallel(said.tp),
        ),
        said,
    )  # fmt: skip


def _parallel(tp: int) -> Literal["auto", "tp"]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if tp in (1, ranks):
        return "tp" if tp > 1 else "auto"
    raise UserError(
        f"--tensor-model-parallel-size {tp} with {ranks} rank(s): for inference all ranks share the model; "
        f"start {tp} with torchrun, or leave the option out"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="inference.py", usage=argparse.SUPPRESS, description=_DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="the model")
    add("--tokenizer-name-or-path", metavar="DIR", help="tokenizer, and config.json where DIR has none")
    add("--task", nargs="+", choices=TASKS, default=list(TASKS), help="by default all, in this order")
    add("--prompt", default=QUESTION, metavar="TEXT", help="not the reference's: for tasks other than chat")
    add("--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (default 128)")
    add("--max-length", type=count, metavar="N", help="longest prompt and answer together")
    add("--temperature", type=number(0, 100, above=True), default=0.7, metavar="T", help="default 0.7")
    add("--top-p", type=number(0, 1, above=True), default=0.95, metavar="P", help="default 0.95")
    add("--top-k", type=whole, default=50, metavar="K", help="default 50; 0: all tokens")
    add("--num-beams", type=count, default=4, metavar="K", help="of the two beam tasks (default 4)")
    add("--seed", type=whole, metavar="N", help="of the drawn tokens")
    add("--add-eos-token", nargs="+", default=[], metavar="TOKEN", help="further tokens that end an answer")
    add("--history-turns", type=whole, default=3, metavar="N", help="of a chat (default 3)")
    add("--hf-chat-template", action="store_true", help="the tokenizer's own template, also for tasks")
    add("--prompt-type", metavar="NAME", help="a chat template by name, also for tasks")
    add("--use-kv-cache", action="store_true", help="always so")
    add("--stream", action="store_true", help="always so, but for beams")
    add("--trust-remote-code", action="store_true", help="run the Python files of the model's folder")
    return parser


def run(job: Job, opened: Opened) -> int:
    """Do the tasks, on every rank.

    Raises:
        UserError: an option that says another thing than the model's config.json.
    """
    options = job.options
    _check_shape(job.said, opened.config)
    length = min(opened.context_length, options.max_length or opened.context_length)
    opened = replace(
        opened,
        context_length=length,
        stop_ids=opened.stop_ids | _ids(options.add_eos_token, opened.tokenizer),
    )
    for task in options.task:
        if opened.group.is_main and task != "chat":
            print(f"\n=============== {task} ===============\n{options.prompt}", flush=True)
        if task == "chat":
            _chat(options, opened)
        else:
            _answer(task, options, opened)
    return 0


def asked_of(task: str, options: argparse.Namespace) -> Asked:
    """The sampling of a task."""
    drawn = task in ("do_sample", "beam_search_with_sampling", "chat")
    return Asked(
        max_new_tokens=options.max_new_tokens, do_sample=drawn, seed=options.seed,
        temperature=options.temperature if drawn else None, top_p=options.top_p if drawn else None,
        top_k=options.top_k if drawn else None, num_beams=options.num_beams if "beam" in task else 1,
    )  # fmt: skip


def _answer(task: str, options: argparse.Namespace, opened: Opened) -> None:
    from shardyard.infer.generate import generate

    streamed: list[str] = []

    def stream(text: str) -> None:
        streamed.append(text)
        print(text, end="", flush=True)

    raw = not (options.hf_chat_template or options.prompt_type)
    generate(
        opened, lambda: prompts_of_words([options.prompt]), Wanted(asked_of(task, options), raw=raw),
        lambda _task, answer, _number: print("" if streamed else answer.text, flush=True), max_running=1,
        on_text=stream, section={}, key=task,
    )  # fmt: skip


def _chat(options: argparse.Namespace, opened: Opened) -> None:
    from shardyard.infer.talk import converse, megatron

    converse(opened, megatron(options.history_turns), Wanted(asked_of("chat", options)), section={})


def _ids(words: Sequence[str], tokenizer: Any) -> frozenset[int]:
    found = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    for word, number_ in found.items():
        if number_ is None or (number_ == tokenizer.unk_token_id and word != tokenizer.unk_token):
            raise UserError(f"--add-eos-token {word}: the tokenizer has no such token")
    return frozenset(found.values())


def _check_shape(said: MegatronWords, config: Any) -> None:
    """config.json decides; a script that says something else means another model."""
    text = config.get_text_config()
    for option, value in said.shape.items():
        known = [getattr(text, key) for key in SHAPE[option] if isinstance(getattr(text, key, None), int)]
        if known and value not in known:
            raise UserError(f"{option} {value}: the model's config.json says {known[0]}, and decides")
