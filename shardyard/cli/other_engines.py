"""``infer_backend: vllm`` and ``sglang`` for generate and for the prompt loop of inference_fsdp2.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardyard.cli.inference_ranks import log_to_stderr
from shardyard.errors import UserError
from shardyard.infer.opening import Choice
from shardyard.infer.prompts import Row, Wanted

if TYPE_CHECKING:
    from shardyard.infer.answers import Answer
    from shardyard.infer.plan import Task


def check_alone(backend: str) -> None:
    """Raise UserError if several ranks were started: these engines start their own processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"infer_backend {backend}: it starts processes of its own; start this command once, without "
            "torchrun and --nproc (all devices of this machine share the model)"
        )


def generate_with(
    backend: str,
    choice: Choice,
    read: Callable[[], Sequence[Row]],
    wanted: Wanted,
    emit: Callable[[Any], Callable[[Task, Answer, int], object]],
) -> None:
    """Answer what ``read`` gives; ``emit`` of the tokenizer takes the answers, in order.

    Raises:
        UserError: the engine is not installed, or cannot do what is asked.
    """
    side, make = _opened(backend, choice)
    from shardyard.infer.generate import told
    from shardyard.infer.plan import Planner

    tasks = Planner(side, wanted)(read())
    take = emit(side.tokenizer)
    with make() as engine:
        for task, answer in told(tasks, engine.answers(tasks)):
            take(task, answer, task.number)


def talk_with(backend: str, choice: Choice, section: Mapping[str, Any]) -> int:
    """The prompt loop of inference_fsdp2.py; answers come whole."""
    side, make = _opened(backend, choice)
    from shardyard.infer.plan import Planner
    from shardyard.infer.talk import FSDP2, talk

    planner = Planner(side, Wanted(), section=section)
    with make() as engine:

        def ask(task: Task, write: Callable[[str], object]) -> Answer:
            answer = next(engine.answers([task]))
            write(answer.text)
            return answer

        talk(FSDP2, planner, ask)
    return 0


def _opened(backend: str, choice: Choice) -> tuple[Any, Callable[[], Any]]:
    """(the model's text side, what starts the engine)."""
    check_alone(backend)
    log_to_stderr()
    from shardyard.device import visible_accelerators
    from shardyard.infer.other_engines import OtherEngine, require
    from shardyard.infer.text_side import read_text_side

    require(backend)
    side = read_text_side(choice)
    devices = 1 if choice.parallel == "none" else max(visible_accelerators()[1], 1)

    def make() -> OtherEngine:
        return OtherEngine(
            backend, side, dtype=choice.dtype, tp=devices, trust_remote_code=choice.trust_remote_code
        )

    return side, make
