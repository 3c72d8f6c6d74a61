"""The gated MLP: which layers and activation a module has, and ours against the families' own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from support.saved import saved_bytes
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardyard.ops.registry import Situation
from shardyard.ops.swiglu import ACTIVATIONS, SWIGLU, GatedKind, find_gated, lean_gated, lean_gated_down

_SIZES: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)
_APART = ("gate_proj", "up_proj", "down_proj")
FAMILIES = [
    (LlamaMLP, hf.LlamaConfig(**_SIZES), GatedKind(*_APART, "silu", 24, 16)),
    (LlamaMLP, hf.LlamaConfig(**_SIZES, mlp_bias=True), GatedKind(*_APART, "silu", 24, 16)),
    (Qwen3MLP, hf.Qwen3Config(**_SIZES), GatedKind(*_APART, "silu", 24, 16)),
    (DeepseekV3MLP, hf.DeepseekV3Config(**_SIZES), GatedKind(*_APART, "silu", 24, 16)),
    (Gemma3MLP, hf.Gemma3TextConfig(**_SIZES), GatedKind(*_APART, "gelu_tanh", 24, 16)),
    (Glm4MLP, hf.Glm4Config(**_SIZES), GatedKind("gate_up_proj", None, "down_proj", "silu", 24, 16)),
]
NAMES = ["llama", "llama-bias", "qwen3", "deepseek_v3", "gemma3", "glm4"]
HERE = Situation(torch.device("cpu"), torch.float32)
BY_NAME = {implementation.name: implementation for implementation in SWIGLU.implementations}


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _mlp(cls: Any, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    module = cls(config)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * _random(*parameter.shape, seed=20 + number)
    return module.to(dtype)


def _through(module: Any, x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(x)
    out.backward(cotangent)
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def _install(module: Any, name: str) -> None:
    (site,) = find_gated(module).sites
    assert BY_NAME[name].unsuited(site, HERE) is None
    BY_NAME[name].install(site)


@pytest.mark.parametrize(("cls", "config", "kind"), FAMILIES, ids=NAMES)
def test_layers_and_activation_are_found(cls: Any, config: Any, kind: GatedKind) -> None:
    with torch.device("meta"):
        module = cls(config)
    assert [site.kind for site in find_gated(module).sites] == [kind]


def test_an_mlp_without_a_gate_is_none() -> None:
    found = find_gated(GPTNeoXMLP(hf.GPTNeoXConfig(**_SIZES)))
    assert found.sites == [] and found.strangers == []


def test_a_formula_of_its_own_is_a_stranger() -> None:
    class Scaled(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    found = find_gated(Scaled(hf.LlamaConfig(**_SIZES)))
    assert found.sites == [] and "Scaled" in found.strangers[0]


class _Capped(LlamaMLP):
    """Of some layers the gate is cut off, as in gemma3n."""

    cap: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate.clamp(max=self.cap)) * self.up_proj(x))


def test_layers_of_a_class_are_told_apart_by_their_settings() -> None:
    config = hf.LlamaConfig(**_SIZES)
    model = torch.nn.ModuleList(_Capped(config) for _ in range(3))
    for layer, cap in zip(model, (1e9, 0.01, 1e9), strict=True):
        layer.cap = cap
    model[2].act_fn = torch.nn.GELU()
    found = find_gated(model)
    assert [(site.name, site.kind.activation) for site in found.sites] == [("0", "silu"), ("2", "gelu")]
    assert found.strangers[0].startswith("1 (_Capped)")


class _OfLayer(LlamaMLP):
    """As zamba2's: the layer that calls it says which it is, and an unknown one is an error."""

    def forward(self, x: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        return super().forward(x) * {0: 1.0}[layer]


class _Odd(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * {}["scale"]


@pytest.mark.parametrize("cls", [_OfLayer, _Odd])
def test_one_that_cannot_be_tried_keeps_its_own_code(cls: Any) -> None:
    found = find_gated(cls(hf.LlamaConfig(**_SIZES)))
    assert found.sites == [] and cls.__name__ in found.strangers[0]


@pytest.mark.parametrize("name", ["lean", "lean_down"])
@pytest.mark.parametrize(("cls", "config", "kind"), FAMILIES, ids=NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_value_and_gradients_are_the_family_s(
    cls: Any, config: Any, kind: GatedKind, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    x, cotangent = (_random(1, 7, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    module = _mlp(cls, config, dtype)
    expected = _through(module, x, cotangent)
    _install(module, name)
    for want, have in zip(expected, _through(module, x, cotangent), strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        assert (have - want).abs().max() <= tolerance * want.abs().max()
    assert torch.equal(expected[0], module(x).detach())


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gradients_are_those_of_finite_differences(activation: str) -> None:
    gate, up = (_random(3, 4, seed=seed, dtype=torch.float64).requires_grad_() for seed in (4, 5))
    weight = _random(2, 4, seed=6, dtype=torch.float64).requires_grad_()
    bias = _random(2, seed=7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: lean_gated(g, u, activation), (gate, up))
    assert torch.autograd.gradcheck(
        lambda g, u, w, b: lean_gated_down(g, u, w, b, activation), (gate, up, weight, bias)
    )


def test_a_closed_form() -> None:
    gate, up = torch.tensor([[0.0, 2.0]]), torch.tensor([[5.0, -3.0]])
    sigmoid = 1 / (1 + 2.718281828459045**-2)
    torch.testing.assert_close(lean_gated(gate, up, "silu"), torch.tensor([[0.0, 2 * sigmoid * -3]]))


def test_a_frozen_last_layer_gets_no_gradient() -> None:
    module = _mlp(Qwen3MLP, hf.Qwen3Config(**_SIZES))
    module.down_proj.weight.requires_grad_(False)
    x, cotangent = _random(1, 7, 16, seed=2), _random(1, 7, 16, seed=3)
    expected = _through(module, x, cotangent)
    _install(module, "lean_down")
    found = _through(module, x, cotangent)
    assert found[-1] is None and expected[-1] is None
    for want, have in zip(expected[:-1], found[:-1], strict=True):
        torch.testing.assert_close(have, want)


def test_what_is_kept() -> None:
    """Beside the input and the weights: 4 tensors [T, inner] in the family's code, 3 and 2 in ours."""
    tensors = 40 * 24 * 4
    kept = {}
    for name in ("eager", "lean", "lean_down"):
        module = _mlp(LlamaMLP, hf.LlamaConfig(**_SIZES))
        if name != "eager":
            _install(module, name)
        x = _random(1, 40, 16, seed=8).requires_grad_()
        kept[name] = saved_bytes(lambda m=module, x=x: m(x), but=[x, *module.parameters()])
    assert kept == {"eager": 4 * tensors, "lean": 3 * tensors, "lean_down": 2 * tensors}


def test_a_last_layer_that_is_not_plain_keeps_its_forward() -> None:
    module = _mlp(LlamaMLP, hf.LlamaConfig(**_SIZES))
    module.down_proj.forward = module.down_proj.forward
    (site,) = find_gated(module).sites
    assert "no plain linear" in (BY_NAME["lean_down"].unsuited(site, HERE) or "")
    assert BY_NAME["lean"].unsuited(site, HERE) is None


@pytest.mark.parametrize("name", ["lean", "lean_down"])
def test_experts_keep_no_activated_gate(name: str) -> None:
    config = hf.Qwen3MoeConfig(**_SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    experts = Qwen3MoeExperts(config)
    for number, parameter in enumerate(experts.parameters()):
        parameter.data = 0.3 * _random(*parameter.shape, seed=30 + number)
    x, weights = _random(40, 16, seed=32).requires_grad_(), _random(40, 2, seed=33).softmax(-1)
    index = torch.stack([torch.arange(40) % 4, (torch.arange(40) + 1) % 4], dim=1)

    def through() -> torch.Tensor:
        return experts(x, index, weights)

    def results() -> list[torch.Tensor]:
        out = through()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *experts.parameters()])]

    expected, kept = results(), saved_bytes(through)
    (site,) = find_gated(experts).sites
    assert site.kind.activation == "silu" and BY_NAME[name].unsuited(site, HERE) is None
    BY_NAME[name].install(site)
    for want, have in zip(expected, results(), strict=True):
        torch.testing.assert_close(have, want)
    assert kept - saved_bytes(through) == 40 * 2 * 8 * 4  # one tensor [tokens x experts of each, inner]
