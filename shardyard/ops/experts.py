"""Experts: one matrix product for the tokens of all experts, or one after the other.

transformers' own switch chooses it (``config._experts_implementation``), which each experts module reads when
it runs; expert parallelism and its exchange stand around the module's forward either way.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from shardyard.ops.registry import EAGER, Example, Found, Implementation, Operation, Site, Situation
from shardyard.ops.self_check import random

Tensor = torch.Tensor
_EXPERTS, _CHOSEN, _WIDEST = 4, 2, 256
_NPU = "shardyard_npu"
_ONE_PRODUCT = "one product for the tokens of all experts"


class ExpertsKind(NamedTuple):
    """The shapes of an experts module's parameters, by name."""

    cls: type
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def find_experts(model: nn.Module) -> Found:
    """Modules whose parameters are stacks of one row per expert, and which read transformers' switch."""
    sites: list[Site] = []
    strangers: list[str] = []
    for name, module in model.named_modules():
        shapes = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
        count = getattr(module, "num_experts", None)
        if not shapes or any(shape[0] != count for shape in shapes.values()):
            continue
        if not any(len(shape) == 3 for shape in shapes.values()):
            continue
        if hasattr(module, "is_transposed") and hasattr(type(module).forward, "__wrapped__"):
            sites.append(Site(name, module, ExpertsKind(type(module), tuple(shapes.items()))))
        elif not strangers:
            strangers.append(f"{name} ({type(module).__name__}) runs its experts in a way of its own")
    return Found(sites, strangers)


def _choose(name: str, site: Site) -> None:
    module: Any = site.module
    module.config._experts_implementation = name


def _odd_sizes(site: Site, situation: Situation) -> str | None:
    """torch multiplies groups of tokens in one kernel only where rows are whole 16-byte pieces."""
    odd = {size for _, shape in site.kind.shapes if len(shape) == 3 for size in shape[1:]}
    odd = {size for size in odd if size * situation.dtype.itemsize % 16}
    return (
        f"{sorted(odd)} of {site.name} are no multiples of 16 bytes, as torch's kernel wants" if odd else None
    )


def _twin(module: nn.Module, parameters: dict[str, Tensor]) -> Any:
    """The module with a few experts, and parameters of ours."""
    twin: Any = copy.copy(module)
    twin.__dict__["_parameters"] = parameters
    twin.num_experts = _EXPERTS
    return twin


def _example(site: Site, situation: Situation) -> Example:
    """Hidden states, weights of routes, and the parameters; sizes are cut to what a check can afford."""
    where = situation.dtype, situation.device
    names = [name for name, _ in site.kind.shapes]
    smaller = _smaller(site)
    shapes = [_cut(shape[1:], smaller) for _, shape in site.kind.shapes]
    parameters = [0.1 * random((_EXPERTS, *shape), 51 + n, *where) for n, shape in enumerate(shapes)]
    hidden = random((situation.tokens, smaller[_hidden_size(site.module)]), 61, *where)
    weights = random((situation.tokens, _CHOSEN), 62, *where).softmax(-1)
    token = torch.arange(situation.tokens, device=situation.device)
    first = token % (_EXPERTS - 1)  # so the last expert is never the first choice, and one has few tokens
    index = torch.stack([first, (first + 1 + token // 40) % _EXPERTS], dim=1)

    def eager(hidden: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        twin = _twin(site.module, dict(zip(names, parameters, strict=True)))
        return inspect.unwrap(type(site.module).forward)(twin, hidden, index, weights)

    return Example(eager, (hidden, weights, *parameters), (index,))


def _hidden_size(module: Any) -> int:
    return module.config.get_text_config().hidden_size


def _cut(shape: tuple[int, ...], smaller: dict[int, int]) -> tuple[int, ...]:
    return tuple(smaller.get(size, size) for size in shape)


def _smaller(site: Site) -> dict[int, int]:
    """The sizes of hidden states and of what is inside an expert -> those of a check."""
    hidden = _hidden_size(site.module)
    down = dict(site.kind.shapes)["down_proj"]
    inner = next((size for size in down[1:] if size != hidden), hidden)
    cut = min(inner, _WIDEST // 2)
    return {hidden: min(hidden, _WIDEST), 2 * inner: 2 * cut, inner: cut}


def _run(name: str, site: Site) -> Any:
    names = [key for key, _ in site.kind.shapes]

    def run(hidden: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        *parameters, index = rest
        twin = _twin(site.module, dict(zip(names, parameters, strict=True)))
        return ALL_EXPERTS_FUNCTIONS[name](twin, hidden, index, weights)

    return run


class _NpuProduct(torch.autograd.Function):
    """Rows sorted by expert, [R, I] x [E, I, O] -> [R, O], by Ascend's kernel. Untested on an NPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return _npu_product(rows, weight, counts, of_weight=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = _npu_product(grad, weight.transpose(1, 2), counts, of_weight=False)
        return of_rows, _npu_product(rows.t(), grad, counts, of_weight=True), None


def _npu_product(left: Tensor, right: Tensor, counts: Tensor, *, of_weight: bool) -> Tensor:
    """Groups are rows of ``left``; ``of_weight``: they are what is summed over."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_grouped_matmul(
        [left], [right], bias=None, group_list=counts, group_list_type=1,
        split_item=3 if of_weight else 2, group_type=2 if of_weight else 0,
    )[0]  # fmt: skip


def sorted_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = _NpuProduct.apply,  # pyright: ignore[reportArgumentType]
) -> Tensor:
    """hidden [N, H], index and weights [N, K] -> [N, H]: rows sorted by expert, two grouped products."""
    tokens, slots = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    experts = torch.arange(module.num_experts, device=chosen.device)
    counts = (chosen[None] == experts[:, None]).sum(1)
    rows = hidden_states[order // slots]
    rows = module._apply_gate(product(rows, module.gate_up_proj.transpose(1, 2), counts))
    rows = product(rows, module.down_proj.transpose(1, 2), counts)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows[places].view(tokens, slots, -1).sum(1).to(hidden_states.dtype)


def _install_npu(site: Site) -> None:
    ALL_EXPERTS_FUNCTIONS.register(_NPU, sorted_experts)
    _choose(_NPU, site)


def _run_npu(site: Site) -> Any:
    ALL_EXPERTS_FUNCTIONS.register(_NPU, sorted_experts)
    return _run(_NPU, site)


def _plain_layout_only(site: Site, _: Situation) -> str | None:
    module: Any = site.module
    if module.is_transposed or module.has_bias or not module.has_gate or module.has_post_expert_norm:
        return f"{site.name} has biases, or lays its weights out in a way that it does not take"
    return None


EXPERTS = Operation(
    name="experts", switch="moe_grouped_gemm", module="experts", find=find_experts, example=_example,
    implementations=(
        Implementation(
            "grouped_mm", functools.partial(_choose, "grouped_mm"), functools.partial(_run, "grouped_mm"),
            unsuited=_odd_sizes,
        ),
        Implementation(
            "npu", _install_npu, _run_npu, devices=("npu",), package=("torch_npu", "torch_npu"),
            unsuited=_plain_layout_only,
        ),
    ),
    fused={"npu": ("npu", "grouped_mm"), "": ("grouped_mm",)},
    automatic={
        "cpu": {"grouped_mm": _ONE_PRODUCT}, "cuda": {"grouped_mm": _ONE_PRODUCT},
        "npu": {"npu": _ONE_PRODUCT},
    },
    leave=functools.partial(_choose, EAGER), beside_compiler=True,
)  # fmt: skip
