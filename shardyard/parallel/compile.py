"""torch.compile: which forwards become graphs, and what is left to eager code between them.

Order (parallel/apply.py): a forward is compiled where it stands on the instance, before recompute wraps it
and before FSDP, whose hooks are around a module's call. So parameters keep their names, gathers stay outside
the graphs, and a recomputed layer runs the same compiled code twice.

Left to eager code are the attention of documents (ops/uncompiled.py), and the blocks of experts: how many
tokens each expert gets is a matter of the data, and hooks on the routers count them. A forward without
gradients (validation, self-tests, the check of an export) is eager too: it would be another compilation.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.device import Device
from shardyard.errors import UserError
from shardyard.parallel.blocks import Blocks, select_blocks
from shardyard.parallel.experts.select import fused_experts

logger = logging.getLogger("shardyard.parallel")

INDUCTOR = "inductor"
_MOST_GRAPHS = 32
"""Of one piece of code. Layers share them, unless they differ in what is frozen, in their window or in having
experts; torch gives up at 8, without a word that a user sees.
"""


@dataclass(frozen=True)
class Compilation:
    """``optimization.compile``, and torch's name of the compiler behind it."""

    mode: Literal["none", "block", "model"] = "none"
    backend: str = INDUCTOR

    def __bool__(self) -> bool:
        return self.mode != "none"


EAGER = Compilation()


def check_compiler(compilation: Compilation, device: Device) -> None:
    """Find out before anything is built whether this machine has what the compiler itself needs.

    Raises:
        UserError: something is missing.
    """
    if not compilation or compilation.backend != INDUCTOR:
        return
    missing = _missing_for_accelerators() if device.is_accelerator else _missing_for_cpus()
    if missing:
        raise UserError(
            f"optimization.compile: {compilation.mode} needs {missing}; install it, or set "
            "optimization.compile: none"
        )


def _missing_for_cpus() -> str:
    named = os.environ.get("CXX")
    if shutil.which(named or "g++") is None:
        return f"a C++ compiler on a CPU, and there is no {named or 'g++ (CXX may name another)'}"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return "" if headers.exists() else f"Python's headers on a CPU, and there is no {headers}"


def _missing_for_accelerators() -> str:
    if find_spec("triton") is None:
        return "the package triton, which is not installed"
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return f"a C compiler for triton, and there is no {named or 'gcc or clang (CC may name another)'}"
    return ""


def apply_compile(model: Any, compilation: Compilation) -> None:
    """Compile each layer's forward (``block``), or that of the model's body (``model``).

    The loss stays outside: the number of labelled positions is a matter of the data.

    Raises:
        UserError: no layer is left to compile.
    """
    if not compilation:
        return
    experts = _blocks_of_experts(model)
    for block in experts:
        block.forward = torch.compiler.disable(block.forward, reason="tokens of an expert are data")
    if compilation.mode == "model":
        blocks: Blocks = [("the model's body", model.base_model)]
    else:
        layers = select_blocks(model, ParallelConfig(), "recompute_modules")  # by default, the layers
        blocks = [(name, layer) for name, layer in layers if layer not in experts]
        if not blocks:
            raise UserError(
                f"optimization.compile: block, but the layers of {type(model).__name__} hold their experts "
                "themselves, and those are not compiled; set it to none"
            )
    for _, block in blocks:
        block.forward = _compiled_for_training(block.forward, compilation.backend)
    logger.info(
        "optimization.compile: %s with %s, %s; the first steps compile",
        compilation.mode,
        compilation.backend,
        f"{len(blocks)} layers" if compilation.mode == "block" else blocks[0][0],
    )


def _compiled_for_training(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    # All sizes are symbols from the first forward on: the number of tokens is another in each micro-batch.
    limit: dict[str, Any] = {"recompile_limit": _MOST_GRAPHS}  # torch's overloads leave it out
    compiled = torch.compile(forward, backend=backend, dynamic=True, **limit)

    @functools.wraps(forward)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return choose


def _blocks_of_experts(model: nn.Module) -> set[nn.Module]:
    """The modules around experts and their router."""
    return {model.get_submodule(name.rpartition(".")[0]) for name, _ in fused_experts(model)}
