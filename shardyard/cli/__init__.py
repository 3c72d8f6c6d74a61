"""The ``shardyard`` command: one verb per job. Nothing is imported before its verb is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from shardyard import __version__
from shardyard.errors import UserError


@dataclass(frozen=True)
class Verb:
    """``function`` of ``module`` takes the words after the verb and returns the exit code."""

    module: str
    function: str
    meaning: str

    def load(self) -> Callable[[Sequence[str]], int]:
        return getattr(import_module(self.module), self.function)


VERBS = {
    "train": Verb("shardyard.cli.train", "train", "train a model: starts the ranks and waits for them"),
    "check": Verb("shardyard.cli.check", "check", "validate a configuration and show every value's origin"),
    "data": Verb("shardyard.cli.data", "data", "look at the data of a run: its report, and samples as text"),
    "preprocess": Verb(
        "shardyard.cli.preprocess", "preprocess", "tokenise files into Megatron's .bin and .idx"
    ),
    "convert": Verb(
        "shardyard.cli.convert", "convert", "turn weights into Hugging Face, DCP or Megatron-core form"
    ),
    "evaluate": Verb(
        "shardyard.cli.evaluate", "evaluate", "loss and perplexity of data sets, benchmarks, comparison"
    ),
    "checkpoint": Verb("shardyard.cli.checkpoint", "checkpoint", "list, verify or prune a run's checkpoints"),
    "generate": Verb("shardyard.cli.generate", "generate", "answer prompts with what was trained"),
    "serve": Verb("shardyard.cli.serve", "serve", "answer HTTP requests in the form of OpenAI's API"),
    "chat": Verb("shardyard.cli.chat", "chat", "talk with what was trained"),
    "schema": Verb("shardyard.cli.check", "schema", "print the JSON schema of the YAML file"),
    "env": Verb("shardyard.cli.env", "env", "print versions and devices, for bug reports"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that ``argv`` names; returns 0, 1 for a fault or 2 for the user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        return _dispatch(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has gone; what Python still holds must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_closed_streams() -> None:
    """Nothing to read, and nowhere to write, for who closed a standard stream: Python has None there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # for ranks that are started; it has the free number
            setattr(sys, name, stream)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"shardyard {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise UserError(_unknown(words[0]))
    code = verb.load()(words[1:])
    sys.stdout.flush()
    return code


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.meaning}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: shardyard VERB ...",
            "",
            *lines,
            "",
            "shardyard VERB --help tells more; --version the version.",
        ]
    )


def _unknown(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"a verb comes before the file: shardyard train {word}"
    close = get_close_matches(word, VERBS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(VERBS)}."
    return f"shardyard has no verb {word!r}; {hint}"
