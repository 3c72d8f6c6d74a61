"""A conversation line by line, in the manner of the reference's two scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardyard.device import agree
from shardyard.errors import UserError
from shardyard.infer.answers import Answer, answers
from shardyard.infer.engines import with_engine
from shardyard.infer.model import Opened
from shardyard.infer.plan import Planner, Task, TooLongError
from shardyard.infer.prompts import Row, Wanted
from shardyard.infer.types import Engine

Ask = Callable[[Task, Callable[[str], object]], Answer]
"""A task -> its answer; the text goes out as it comes."""


@dataclass(frozen=True)
class Manner:
    """The words of a prompt loop."""

    greeting: str
    asks: str
    answers: str
    after: str
    leave: tuple[str, ...]
    forget: tuple[str, ...] = ()
    history_turns: int | None = None
    """Earlier turns that are told again; None: all that fit."""


FSDP2 = Manner(
    ">>> Entering Interactive Chat Mode. Type 'exit' to quit.", "\nUser: ", "Assistant: ", "-" * 40,
    ("exit", "quit"),
)  # fmt: skip


def megatron(history_turns: int) -> Manner:
    """The words of the Megatron entry."""
    return Manner(
        "You can talk now: clear or new forgets what was said; q, quit or exit ends.", "\nYou >> ",
        "\nModel: ", "", ("q", "quit", "exit"), ("clear", "new"), history_turns,
    )  # fmt: skip


def converse(
    opened: Opened, manner: Manner, wanted: Wanted, *, section: Mapping[str, Any] | None = None
) -> int:
    """`talk` with an opened model; every rank calls it, and rank 0 reads and writes.

    Raises:
        UserError: a model that cannot hold a conversation, or settings that contradict. On every rank.
    """
    made: list[Planner] = []

    def prepare() -> str:
        if not opened.tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, so it cannot hold a conversation; name one "
                "(inference.template, --template, --prompt-type), or continue texts with `shardyard generate "
                "--raw`"
            )
        made.append(Planner(opened, wanted, section=section))
        return ""

    agree(opened.group, "infer/talk", prepare)

    def work(engine: Engine) -> None:
        def ask(task: Task, write: Callable[[str], object]) -> Answer:
            try:
                return next(answers(engine, [task], opened.tokenizer, on_text=write))
            except ValueError as error:  # more than the memory holds, or another model's tokens
                raise UserError(str(error)) from error

        talk(manner, made[0], ask)

    with_engine(opened, work, max_running=1)
    return 0


def talk(
    manner: Manner,
    planner: Planner,
    ask: Ask,
    read: Callable[[str], str] = input,
    write: Callable[[str], Any] = lambda text: print(text, end="", flush=True),
) -> None:
    """Ask and answer until a word of leaving or the input's end. ``read`` shows its argument, returns a line.

    A message that cannot be answered is told, and is forgotten.
    """
    write(f"{manner.greeting}\n")
    history: list[dict[str, str]] = []
    while (said := _said(manner, read)) is not None:
        if said.lower() in manner.forget:
            history.clear()
            write("forgotten\n")
            continue
        if not said:
            continue
        try:
            task, told = _task(planner, history, said, manner.history_turns)
        except UserError as error:
            write(f"{error}\n")
            continue
        if dropped := (len(history) - len(told)) // 2:
            history = told
            if manner.history_turns is None:
                write(f"({dropped} earlier turn(s) do not fit the context and are forgotten)\n")
        write(manner.answers)
        try:
            answer = ask(task, write)
        except UserError as error:
            write(f"no answer: {error}\n")
            continue
        write(f"\n{manner.after}\n" if manner.after else "\n")
        if answer.error:
            write(f"no answer: {answer.error}\n")
            continue
        history += [{"role": "user", "content": said}, {"role": "assistant", "content": answer.text}]
    write("\n")


def _said(manner: Manner, read: Callable[[str], str]) -> str | None:
    try:
        said = read(manner.asks).strip()
    except EOFError:
        return None
    return None if said.lower() in manner.leave else said


def _task(
    planner: Planner, history: list[dict[str, str]], said: str, turns: int | None
) -> tuple[Task, list[dict[str, str]]]:
    """The task of the next answer, and as much of the history as has room in its prompt."""
    told = list(history) if turns is None else history[len(history) - 2 * min(turns, len(history) // 2) :]
    while True:
        try:
            row = Row("this message", messages=[*told, {"role": "user", "content": said}])
            return planner([row])[0], told
        except TooLongError:
            if not told:
                raise
            told = told[2:]
