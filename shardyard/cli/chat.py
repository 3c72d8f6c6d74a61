"""``shardyard chat``: talk with a model on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.cli.chat_screen import Keyboard, Screen
from shardyard.cli.inference_options import (
    add_model_options,
    add_sampling_options,
    asked_of,
    choice_of,
    parse_verb,
    verb_parser,
)
from shardyard.cli.inference_ranks import run_verb, with_model
from shardyard.errors import UserError
from shardyard.infer.asked import Asked, sampling_of
from shardyard.infer.openai_messages import tools_of
from shardyard.infer.opening import Choice

if TYPE_CHECKING:
    from shardyard.infer.chat import Answered, Talk
    from shardyard.infer.model import Opened
    from shardyard.infer.types import Engine, Sampling

DESCRIPTION = """\
shardyard chat --model PATH [options]

Talks with a model: type a message, get an answer. Ctrl-C stops an answer, /exit or Ctrl-D ends the talk, and
/help tells the rest. Standard input that is no terminal is read as one message a line.
"""
HELP = """\
/system TEXT   set the system message and begin anew; without TEXT show it
/clear         forget the talk so far (also: clear, new)
/retry         answer the last message again
/result TEXT   the result of a function that the model has called
/save FILE     add the talk to FILE, one line of JSON (a row of chat data)
/exit          end (also: exit, quit, q, Ctrl-D)
A line that ends in \\ goes on in the next one. A message between two lines of \"\"\" is taken as it stands.
"""
_WORDS = {"exit": "/exit", "quit": "/exit", "q": "/exit", "clear": "/clear", "new": "/clear"}
"""The reference's words."""


@dataclass(frozen=True)
class Job:
    """What the words of the verb ask for."""

    choice: Choice
    asked: Asked
    system: str | None
    tools: tuple[dict[str, Any], ...]
    thoughts: bool | None
    stats: bool


def chat(argv: Sequence[str]) -> int:
    """Run the verb: 0.

    Raises:
        UserError: a wrong option, or a model without a chat template.
    """
    return run_verb("chat", argv, read_chat, run_chat)


def read_chat(words: Sequence[str]) -> Job | None:
    """The job of the words; None when they asked for the help."""
    parser = verb_parser("chat", DESCRIPTION)
    parser.epilog = "In the talk:\n" + HELP
    add = parser.add_argument_group("talk").add_argument
    add("--system", metavar="TEXT", help="system message")
    add("--tools", metavar="FILE", help="JSON list of functions that the model may call, in OpenAI's form")
    add(
        "--thoughts", choices=["show", "hide"],
        help="the model's thoughts, dim on a terminal (default: show there, else hide)",
    )  # fmt: skip
    add("--stats", action="store_true", help="tokens and speed of each answer, on standard error")
    add_model_options(parser)
    add_sampling_options(parser)
    options = parse_verb(parser, words)
    if options is None:
        return None
    thoughts = None if options.thoughts is None else options.thoughts == "show"
    return Job(
        choice_of(options), asked_of(options), options.system, _tools(options.tools), thoughts, options.stats
    )


def _tools(name: str | None) -> tuple[dict[str, Any], ...]:
    if name is None:
        return ()
    try:
        found = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--tools {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--tools {name}: not JSON: {error}") from error
    try:
        return tools_of(found)
    except UserError as error:
        raise UserError(f"--tools {name}: {error}") from error


def run_chat(job: Job) -> int:
    """Talk, on every rank of the run: rank 0 reads and writes."""
    return with_model(job.choice, lambda opened: _talk(job, opened))


def _talk(job: Job, opened: Opened) -> int:
    from shardyard.device import agree
    from shardyard.infer.chat import Talk
    from shardyard.infer.chat_format import ChatFormat
    from shardyard.infer.engines import with_engine

    prepared: list[tuple[ChatFormat, Asked, Sampling]] = []  # of rank 0

    def prepare() -> str:
        section = (opened.run or {}).get("inference")
        asked, sampling = sampling_of(job.asked, section, opened.defaults, opened.stop_ids)
        prepared.append((ChatFormat.of(opened), asked, sampling))
        return ""

    agree(opened.group, "infer/chat", prepare)

    def work(engine: Engine) -> int:
        form, asked, sampling = prepared[0]
        talk = Talk(
            engine, opened.tokenizer, form, sampling, stop=asked.stop or (), system=job.system,
            tools=job.tools,
        )  # fmt: skip
        Loop(talk, stats=job.stats, thoughts=job.thoughts).run(opened.name)
        return 0

    return with_engine(opened, work, max_running=1) or 0


class Loop:
    """Messages and commands, one after another, until the end of the input."""

    def __init__(self, talk: Talk, *, stats: bool = False, thoughts: bool | None = None) -> None:
        self._talk = talk
        self._stats = stats
        self._screen = Screen(thoughts=sys.stdout.isatty() if thoughts is None else thoughts)
        self._keyboard = Keyboard()
        self._commands: dict[str, Callable[[str], object]] = {
            "/help": lambda _: _say(HELP.rstrip()),
            "/system": self._system,
            "/clear": lambda _: self._clear(),
            "/retry": lambda _: self._answer(talk.retry),
            "/result": self._result,
            "/save": self._save,
        }

    def run(self, name: str) -> None:
        """Until /exit or the end of the input; ``name`` is the model's."""
        if sys.stdin.isatty():
            _say(f"{name}: type a message; /help tells more, /exit ends.")
        while True:
            try:
                message = self._keyboard.read()
            except KeyboardInterrupt:
                _say("\n(/exit or Ctrl-D ends the talk)")
                continue
            except UnicodeDecodeError as error:
                raise UserError(f"standard input: not UTF-8: {error.reason}") from error
            if message is None:
                return
            word, _, rest = message.strip().partition(" ")
            rest = rest.strip()
            command = _WORDS.get(message.strip().lower(), word)
            if self._keyboard.was_block or not command.startswith("/"):
                if message.strip():
                    self._try(lambda text=message: self._answer(lambda show: self._talk.ask(text, show)))
            elif command == "/exit":
                return
            elif command in self._commands:
                self._try(lambda run=self._commands[command], text=rest: run(text))
            else:
                _say(f'{command}: no such command; /help lists them (a message in """ may begin with /)')

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except UserError as error:
            _say(f"error: {error}")

    def _answer(self, ask: Callable[[Callable[[Any], object]], Answered]) -> None:
        try:
            answered = ask(self._screen.show)
        finally:
            self._screen.end()
        if answered.dropped:
            _say(
                f"(the context is full: the first {answered.dropped} messages were dropped, and the model no "
                "longer sees them)"
            )
        notes = {
            "interrupted": "(stopped)",
            "length": "(cut: the answer reached --max-new-tokens or the context's end)",
            "error": f"error: {answered.error}",
        }
        if answered.reason in notes:
            _say(notes[answered.reason])
        elif not (answered.reply.content or answered.reply.tool_calls or answered.reply.reasoning):
            _say("(an empty answer)")
        if self._stats:
            _say(_stats(answered))
        if answered.reply.tool_calls:
            _say("(/result TEXT gives the result of a call)")

    def _system(self, text: str) -> None:
        if not text:
            _say(self._talk.system if self._talk.system is not None else "(no system message)")
            return
        self._talk.system = text
        self._clear()

    def _clear(self) -> None:
        self._talk.clear()
        _say("(a new talk)")

    def _result(self, text: str) -> None:
        if self._talk.result(text):
            self._answer(self._talk.go_on)

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save FILE: which file?")
        path = Path(name).expanduser()
        _say(f"({path}: a row of {self._talk.save(path)} messages)")


def _stats(answered: Answered) -> str:
    later = answered.seconds - answered.first_token
    speed = (answered.tokens - 1) / later if answered.tokens > 1 and later > 0 else 0.0
    return (
        f"({answered.tokens} tokens in {answered.seconds:.2f} s, the first after "
        f"{answered.first_token:.2f} s, then {speed:.1f} tokens/s)"
    )


def _say(text: str) -> None:
    """A word of the program, not of the model."""
    print(text, file=sys.stderr, flush=True)
