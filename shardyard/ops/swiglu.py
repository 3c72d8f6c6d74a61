"""The gated MLP, down(act(gate(x)) * up(x)): what it keeps between forward and backward.

The family's own code keeps four tensors as wide as the MLP: gate, act(gate), up and the product, which is the
input of the last layer. ``lean`` keeps gate, up and the product; ``lean_down`` gate and up only, for the
product is made again where the weight's gradient wants it. Layers stay modules that are called, so what
splits or shards them works as before.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers.integrations import moe

from shardyard.ops.registry import Example, Found, Implementation, Operation, Site, Situation, settings_of
from shardyard.ops.self_check import random, tried

Tensor = torch.Tensor
_aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation, and its input's gradient from (gradient, input), written over the gradient."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _gelu_of(approximate: str) -> Activation:
    return Activation(
        functools.partial(F.gelu, approximate=approximate),
        lambda grad, x: _aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=grad),
    )


ACTIVATIONS = {
    "silu": Activation(F.silu, lambda grad, x: _aten.silu_backward.grad_input(grad, x, grad_input=grad)),
    "gelu_tanh": _gelu_of("tanh"),
    "gelu": _gelu_of("none"),
}


class GatedKind(NamedTuple):
    """The names of an MLP's layers, its activation, and how wide it is inside and outside.

    Without names: experts, whose gate and up come behind one another from one product for all of them.
    """

    gate: str
    up: str | None
    """None: the layer ``gate`` gives gate and up, one behind the other."""
    down: str
    activation: str
    inner: int
    outer: int


# (gate, up, down), as families name them.
_LAYERS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", None, "down_proj"),
    ("input_linear", None, "output_linear"),
)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation].forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        activation = ACTIVATIONS[ctx.activation]
        return *_gradients(grads[0] * up, grads[0], activation.forward(gate), gate, activation), None


def _gradients(
    of_active: Tensor, of_product: Tensor, active: Tensor, gate: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; ``of_active`` and ``active`` are written over."""
    return activation.backward(of_active, gate), active.mul_(of_product)


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return F.linear(ACTIVATIONS[activation].forward(gate).mul_(up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        activation, (grad,) = ACTIVATIONS[ctx.activation], grads
        active = activation.forward(gate)
        of_weight = of_bias = of_gate = of_up = None
        rows = grad.reshape(-1, grad.shape[-1])
        product = active * up
        if ctx.needs_input_grad[2]:
            of_weight = rows.t() @ product.reshape(-1, up.shape[-1])
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            of_product = grad @ weight
            of_active = torch.mul(of_product, up, out=product)  # memory that is there costs no page faults
            of_gate, of_up = _gradients(of_active, of_product, active, gate, activation)
        return of_gate, of_up, of_weight, of_bias, None


def lean_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, elementwise; keeps its two inputs."""
    return _Gated.apply(gate, up, activation)  # pyright: ignore[reportReturnType]


def lean_gated_down(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(act(gate) * up) weight^T + bias; keeps gate, up and the weight."""
    return _GatedDown.apply(gate, up, weight, bias, activation)  # pyright: ignore[reportReturnType]


def liger_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Liger's Triton kernels. Untested on a GPU."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

    return (LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction).apply(gate, up)


def npu_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Ascend's kernel, which wants gate and up behind one another. Untested on an NPU."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_swiglu(torch.cat([gate, up], dim=-1), dim=-1)


class Halves(NamedTuple):
    """What a layer gets whose input is act(gate) * up. Hooks on modules see the tensors in it."""

    gate: Tensor
    up: Tensor


def find_gated(model: nn.Module) -> Found:
    """The MLPs of three layers (or two, where gate and up are one) and an activation."""
    sites: list[Site] = []
    strangers: list[str] = []
    kinds: dict[Any, GatedKind | None] = {}
    for name, module in model.named_modules():
        if (of_experts := _gate_of_experts(module)) is not None:
            sites.append(Site(name, module, of_experts))
            continue
        names = next((n for n in _LAYERS if all(c is None or c in module._modules for c in n)), None)
        if names is None:
            continue
        down: Any = module._modules[names[2]]
        sizes = getattr(down, "in_features", 0), getattr(down, "out_features", 0)
        key = settings_of(module), names
        if key not in kinds:
            kinds[key] = _kind_of(module, names, *sizes) if all(sizes) else None
        kind = kinds[key]
        if kind is not None:
            sites.append(Site(name, module, kind))
        elif not strangers:
            strangers.append(f"{name} ({type(module).__name__}) computes something of its own")
    return Found(sites, strangers)


def _gate_of_experts(module: Any) -> GatedKind | None:
    """Of experts whose rows are gated as transformers' own function does it."""
    own = getattr(moe, "_default_apply_gate", None)
    if own is None or getattr(type(module), "_apply_gate", None) is not own or not module.has_gate:
        return None
    x = random((3, 8), 12, torch.float32, "cpu")
    with torch.no_grad():
        active = module.act_fn(x)
        fitting = (key for key, known in ACTIVATIONS.items() if torch.allclose(active, known.forward(x)))
        activation = next(fitting, None)
    if activation is None:
        return None
    shape = module._parameters["down_proj"].shape
    return GatedKind("", None, "", activation, min(shape[1:]), max(shape[1:]))


def _kind_of(module: nn.Module, names: Any, inner: int, outer: int) -> GatedKind | None:
    """Tried on tiny layers: the formula whose numbers the module's own forward gives."""
    if len(inspect.signature(type(module).forward).parameters) != 2:  # with self
        return None
    gate, up, down = names
    layers = {
        gate: _tiny_linear(6, 8 if up else 16, 5), **({up: _tiny_linear(6, 8, 6)} if up else {}),
        down: _tiny_linear(8, 6, 7),
    }  # fmt: skip
    x = random((1, 5, 6), 8, torch.float32, "cpu")
    twin: Any = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **layers}
    for activation in ACTIVATIONS:
        kind = GatedKind(gate, up, down, activation, inner, outer)
        theirs, ours = tried(type(module).forward, twin, x), tried(_forward, _product, twin, kind, x)
        if theirs is None or ours is None:
            return None
        if isinstance(theirs, Tensor) and torch.allclose(theirs, ours, rtol=1e-5, atol=1e-7):
            return kind
    return None


def _tiny_linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    with torch.device("meta"):  # where initialising draws no random number
        layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.float32)
    layer.weight = nn.Parameter(random((outputs, inputs), seed, torch.float32, "cpu"), requires_grad=False)
    return layer


def _product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As the families write it."""
    return ACTIVATIONS[activation].forward(gate) * up


def _forward(function: Any, module: Any, kind: GatedKind, x: Tensor) -> Tensor:
    return module._modules[kind.down](function(*_halves(module, kind, x), kind.activation))


def _forward_of_halves(module: Any, kind: GatedKind, x: Tensor) -> Tensor:
    return module._modules[kind.down](_halves(module, kind, x))


def _halves(module: Any, kind: GatedKind, x: Tensor) -> Halves:
    gate = module._modules[kind.gate](x)
    if kind.up is None:
        return Halves(*gate.chunk(2, dim=-1))
    return Halves(gate, module._modules[kind.up](x))


def _down_forward(layer: Any, activation: str, input: Halves | Tensor) -> Tensor:
    """Of the last layer; what reads its weight is inside, so that a view of it (tp's) is what is read."""
    if isinstance(input, Halves):
        return lean_gated_down(*input, layer.weight, layer.bias, activation)
    return F.linear(input, layer.weight, layer.bias)


def _gate_rows(function: Any, activation: str, rows: Tensor) -> Tensor:
    """[R, 2I] -> [R, I]"""
    gate, up = rows.chunk(2, dim=-1)
    return function(gate, up, activation)


def _install_down(site: Site) -> None:
    module: Any = site.module
    kind: GatedKind = site.kind
    if not kind.down:  # what the product of all experts keeps is its own affair
        module._apply_gate = functools.partial(_gate_rows, lean_gated, kind.activation)
        return
    layer: Any = module._modules[kind.down]
    layer.forward = functools.partial(_down_forward, layer, kind.activation)
    module.forward = functools.partial(_forward_of_halves, module, kind)


def _not_plain(site: Site, _: Situation) -> str | None:
    layer = site.module._modules.get(site.kind.down)
    if layer is None:
        return None
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return f"{site.name}.{site.kind.down} is no plain linear layer"
    return None


def _silu_only(site: Site, _: Situation) -> str | None:
    return None if site.kind.activation == "silu" else f"{site.name} has a gate of {site.kind.activation}"


def _not_exact_gelu(site: Site, _: Situation) -> str | None:
    return f"{site.name} has a gate of gelu" if site.kind.activation == "gelu" else None


def _example(site: Site, situation: Situation) -> Example:
    """gate, up and a slice of the last layer's weight."""
    kind, where = site.kind, (situation.dtype, situation.device)
    gate, up = (random((1, situation.tokens, kind.inner), seed, *where) for seed in (9, 10))
    weight = random((min(kind.outer, 64), kind.inner), 11, *where) * kind.inner**-0.5

    def eager(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return F.linear(_product(gate, up, kind.activation), weight)

    return Example(eager, (gate, up, weight))


def _elementwise(name: str, function: Any, **limits: Any) -> Implementation:
    def install(site: Site) -> None:
        module: Any = site.module
        kind: GatedKind = site.kind
        if kind.down:
            module.forward = functools.partial(_forward, function, module, kind)
        else:
            module._apply_gate = functools.partial(_gate_rows, function, kind.activation)

    def run(site: Site) -> Any:
        return lambda gate, up, weight: F.linear(function(gate, up, site.kind.activation), weight)

    return Implementation(name, install, run, **limits)


def _run_down(site: Site) -> Any:
    return lambda gate, up, weight: lean_gated_down(gate, up, weight, None, site.kind.activation)


_SAVES = "keeps gate and up only; the product is made again in the backward"

SWIGLU = Operation(
    name="swiglu", switch="use_fused_swiglu", module="gated MLP", find=find_gated, example=_example,
    implementations=(
        Implementation("lean_down", _install_down, _run_down, unsuited=_not_plain),
        _elementwise("lean", lean_gated),
        _elementwise(
            "liger", liger_gated, devices=("cuda", "npu"), package=("liger-kernel", "liger_kernel"),
            unsuited=_not_exact_gelu,
        ),
        _elementwise(
            "npu", npu_gated, devices=("npu",), package=("torch_npu", "torch_npu"), unsuited=_silu_only
        ),
    ),
    fused={
        "cuda": ("liger", "lean_down", "lean"), "npu": ("npu", "lean_down", "lean"),
        "": ("lean_down", "lean"),
    },
    automatic={
        "cpu": {"lean_down": _SAVES, "lean": "keeps gate, up and their product"},
        "cuda": {"liger": "one kernel each way; keeps gate, up and their product"},
        "npu": {"npu": "one kernel each way"},
    },
)  # fmt: skip
