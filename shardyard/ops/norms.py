"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * scale, over the last dimension (arXiv:1910.07467).

Families differ in the scale (w, or 1 + w as Gemma), and in what is rounded to the input's dtype before it is
applied. Which of these a module computes is found by trying its own forward, not from its class.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from shardyard.ops.norm_linear import install_readers, leave_source
from shardyard.ops.registry import Example, Found, Implementation, Operation, Site, Situation, settings_of
from shardyard.ops.self_check import random, tried

Tensor = torch.Tensor


class NormKind(NamedTuple):
    """What a module computes on rows of ``width`` numbers."""

    width: int
    eps: float
    offset: float
    """The scale is ``offset`` + weight."""
    rounds_first: bool
    """The normalised row is rounded to the input's dtype before the scale is applied (Llama), or after."""


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number per row; what lies between is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        rstd = squares.div_(x.shape[-1]).add_(kind.eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.kind = kind
        ctx.mark_non_differentiable(rstd)
        return _scaled(x, weight, rstd, kind), rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """With n = x rstd and s = g scale: dx = rstd (s - n mean(s n)), dweight = sum over rows of g n."""
        x, weight, rstd = ctx.saved_tensors
        width = x.shape[-1]
        grad = grads[0].to(rstd.dtype)
        scale = _scale(weight, ctx.kind, rstd.dtype)
        normed = x * rstd
        product = grad * normed
        rows = product.reshape(-1, width)
        of_weight = rows.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        mean = rows.mv(scale).div_(-width).view_as(rstd)
        of_input = torch.mul(grad, scale, out=product)
        return of_input.addcmul_(normed, mean).mul_(rstd).to(x.dtype), of_weight, None


def _scaled(x: Tensor, weight: Tensor, rstd: Tensor, kind: NormKind) -> Tensor:
    normed = x * rstd
    if kind.rounds_first and normed.dtype != x.dtype:
        return normed.to(x.dtype) * weight
    return normed.mul_(_scale(weight, kind, rstd.dtype)).to(x.dtype)


def _scale(weight: Tensor, kind: NormKind, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + kind.offset if kind.offset else weight.to(dtype)


def lean_rms_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """[..., width] -> the same."""
    return _RmsNorm.apply(x, weight, kind)[0]  # pyright: ignore[reportOptionalSubscript]


def lean_rms_norm_for_layers(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """The same, for layers that make it again (norm_linear.py)."""
    out, rstd = _RmsNorm.apply(x, weight, kind)  # pyright: ignore[reportGeneralTypeIssues]
    return leave_source(out, functools.partial(_scaled, kind=kind), x, weight, rstd)


def torch_rms_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """PyTorch's own, which rounds once, at the end."""
    return F.rms_norm(x, (kind.width,), weight, kind.eps)


def liger_rms_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Liger's Triton kernel. Untested on a GPU."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    casting = "llama" if kind.rounds_first else "gemma"
    return LigerRMSNormFunction.apply(x, weight, kind.eps, kind.offset, casting, False)


def npu_rms_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Ascend's kernel. Untested on an NPU."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_rms_norm(x, weight, epsilon=kind.eps)[0]


def rms_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """The families' own steps."""
    normed = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + kind.eps)
    if kind.rounds_first:
        return weight * normed.to(x.dtype)
    return (normed * (kind.offset + weight.float() if kind.offset else weight)).to(x.dtype)


def find_norms(model: nn.Module) -> Found:
    """The modules that normalise rows by their root mean square and scale them."""
    sites: list[Site] = []
    strangers: list[str] = []
    kinds: dict[Any, NormKind | None] = {}
    for name, module in model.named_modules():
        if (sizes := _sizes_of(module)) is None:
            continue
        key = settings_of(module), *sizes
        if key not in kinds:
            kinds[key] = _kind_of(module, *sizes)
        kind = kinds[key]
        if kind is not None:
            sites.append(Site(name, module, kind, model.get_submodule(name.rpartition(".")[0])))
        elif "RMS" in type(module).__name__ and not strangers:
            strangers.append(f"{name} ({type(module).__name__}) computes something of its own")
    return Found(sites, strangers)


def _sizes_of(module: nn.Module) -> tuple[int, float] | None:
    """Width and eps of a module that is nothing but a vector ``weight`` and a forward of one argument."""
    if set(module._parameters) != {"weight"} or module._modules or module._buffers:
        return None
    weight, eps = module._parameters["weight"], getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    alone = len(inspect.signature(type(module).forward).parameters) == 2  # with self
    if not alone or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    return weight.shape[0], eps


def _kind_of(module: nn.Module, width: int, eps: float) -> NormKind | None:
    """The formula that gives exactly what the module's forward gives, in bf16 and, more or less, in fp32."""
    rows = random((9, width), 1, torch.float32, "cpu") * torch.logspace(-4, 1, 9)[:, None]
    weight = random((width,), 2, torch.float32, "cpu")
    for offset, rounds_first in ((0.0, True), (0.0, False), (1.0, False)):
        kind = NormKind(width, eps, offset, rounds_first)
        if all(_agrees(module, kind, rows, weight, dtype) for dtype in (torch.bfloat16, torch.float32)):
            return kind
    return None


def _agrees(module: nn.Module, kind: NormKind, rows: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    x, w = rows.to(dtype), weight.to(dtype)
    theirs, ours = tried(_twin(module, w), x), tried(rms_norm, x, w, kind)
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    return torch.equal(theirs, ours) if dtype != torch.float32 else torch.allclose(theirs, ours, rtol=1e-5)


def _twin(module: nn.Module, weight: Tensor) -> Any:
    """The class's own forward, over a weight of ours."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {"weight": weight}
    return functools.partial(type(module).forward, twin)


def _example(site: Site, situation: Situation) -> Example:
    kind: NormKind = site.kind
    x = random((1, situation.tokens, kind.width), 3, situation.dtype, situation.device)
    weight = 1 - kind.offset + 0.1 * random((kind.width,), 4, situation.dtype, situation.device)

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return _twin(site.module, weight)(x)

    return Example(eager, (x, weight))


def _implementation(name: str, function: Any, **limits: Any) -> Implementation:
    def install(site: Site) -> None:
        chosen = function
        if function is lean_rms_norm_for_layers:
            read = site.block is not None and install_readers(site.block, site.kind.width)
            chosen = function if read else lean_rms_norm
        site.module.forward = functools.partial(_forward, chosen, site.module, site.kind)

    def run(site: Site) -> Any:
        return functools.partial(function, kind=site.kind)

    return Implementation(name, install, run, **limits)


def _forward(function: Any, module: Any, kind: NormKind, hidden_states: Tensor) -> Tensor:
    if function is lean_rms_norm_for_layers and issubclass(type(module), FSDPModule):
        # A unit of its own is gathered for its own backward, which comes after those of the layers.
        function = lean_rms_norm
    return function(hidden_states, module.weight, kind)


def _plain_scale_only(site: Site, _: Situation) -> str | None:
    return f"{site.name} scales by 1 + weight, which it does not" if site.kind.offset else None


RMS_NORM = Operation(
    name="rms_norm", switch="use_fused_rmsnorm", module="RMSNorm", find=find_norms, example=_example,
    implementations=(
        _implementation("lean_linear", lean_rms_norm_for_layers, devices=("cpu",)),
        _implementation("lean", lean_rms_norm),
        _implementation("torch", torch_rms_norm, devices=("cuda", "npu"), unsuited=_plain_scale_only),
        _implementation(
            "liger", liger_rms_norm, devices=("cuda", "npu"), package=("liger-kernel", "liger_kernel")
        ),
        _implementation(
            "npu", npu_rms_norm, devices=("npu",), package=("torch_npu", "torch_npu"),
            unsuited=_plain_scale_only,
        ),
    ),
    fused={
        "cuda": ("liger", "torch", "lean"), "npu": ("npu", "lean"), "cpu": ("lean_linear", "lean"),
        "": ("lean",),
    },
    automatic={
        "cpu": {
            "lean_linear": "its output is made again for the layers that read it",
            "lean": "keeps the input and one number a row",
        },
        "cuda": {"liger": "one kernel each way", "torch": "one kernel each way"},
        "npu": {"npu": "one kernel each way", "lean": "keeps the input and one number a row"},
    },
)  # fmt: skip
