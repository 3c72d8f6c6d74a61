"""One call of lm-eval: tasks and a model in, samples and scores out. Needs lm-eval."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lm_eval.api.task  # pyright: ignore[reportMissingImports]
import lm_eval.utils  # pyright: ignore[reportMissingImports]
import numpy as np
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import evaluator  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from shardyard.evaluate.harness import OpenedLM

if TYPE_CHECKING:
    from shardyard.evaluate.benchmarks import Benchmarks

_FEWSHOT_SEED = 1234
"""lm-eval's own, of which examples are drawn."""


def ask(lm: OpenedLM, tasks: Mapping[str, Any], asked: Benchmarks, *, with_chat: bool) -> dict[str, Any]:
    """lm-eval's ``evaluate`` of the tasks, with all samples; templates of tasks run in Jinja's sandbox."""
    _guard_templates()
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)  # its bars would stand between ours
    random.seed(asked.seed)
    np.random.seed(1234 + asked.seed)
    for task in tasks.values():
        task.set_fewshot_seed(_FEWSHOT_SEED + asked.seed)
    told = evaluator.evaluate(
        lm=lm,
        task_dict={"tasks": dict(tasks), "groups": {}, "group_map": {}},
        limit=asked.limit,
        bootstrap_iters=0,
        log_samples=True,
        system_instruction=asked.system,
        apply_chat_template=with_chat,
        fewshot_as_multiturn=with_chat,
    )
    assert told is not None  # there is one rank, for lm-eval
    return dict(told)


def _guard_templates() -> None:
    plain = lm_eval.utils.env
    if isinstance(plain, SandboxedEnvironment):
        return
    guarded = SandboxedEnvironment(
        loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    guarded.filters.update(plain.filters)
    lm_eval.utils.env = guarded
