"""RMSNorm: which formula a module has, and ours against the families' own code in value and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.saved import saved_bytes
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from shardyard.ops.norms import RMS_NORM, NormKind, find_norms, lean_rms_norm, rms_norm, torch_rms_norm
from shardyard.ops.registry import Implementation, Site

# (class, offset of the scale, whether rows are rounded before the scale)
FAMILIES = [
    (LlamaRMSNorm, 0.0, True), (Qwen3RMSNorm, 0.0, True), (Qwen3MoeRMSNorm, 0.0, True),
    (DeepseekV3RMSNorm, 0.0, True), (Glm4RMSNorm, 0.0, True), (GptOssRMSNorm, 0.0, False),
    (Olmo2RMSNorm, 0.0, False), (Gemma3RMSNorm, 1.0, False),
]  # fmt: skip
LEAN = next(implementation for implementation in RMS_NORM.implementations if implementation.name == "lean")


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norm(cls: Any, width: int = 24, dtype: torch.dtype = torch.float32) -> Any:
    module = cls(width, eps=1e-5)
    module.weight.data = 1 + 0.3 * _random(width, seed=1)
    return module.to(dtype)


def _through(module: Any, x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.weight.grad = None
    out = module(x)
    out.backward(cotangent)
    return [out.detach(), x.grad, module.weight.grad]


def _site(module: Any, implementation: Implementation) -> Site:
    (site,) = find_norms(module).sites
    implementation.install(site)
    return site


@pytest.mark.parametrize(("cls", "offset", "rounds_first"), FAMILIES)
def test_the_formula_of_a_family_is_found(cls: Any, offset: float, rounds_first: bool) -> None:
    with torch.device("meta"):  # as when a model is built
        module = cls(24, eps=1e-5)
    (site,) = find_norms(module).sites
    assert site.kind == NormKind(24, 1e-5, offset, rounds_first)


def test_what_is_no_rms_norm_is_left_alone() -> None:
    for module in (
        torch.nn.LayerNorm(24, bias=False),
        Cohere2LayerNorm(24),
        torch.nn.Linear(4, 4, bias=False),
    ):
        assert find_norms(module).sites == []


@pytest.mark.parametrize("cls", [cls for cls, _, _ in FAMILIES])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradients_are_the_family_s(cls: Any, dtype: torch.dtype, tolerance: float) -> None:
    x, cotangent = (_random(2, 3, 5, 24, seed=seed, dtype=dtype) for seed in (2, 3))
    module = _norm(cls, dtype=dtype)
    expected = _through(module, x, cotangent)
    _site(module, LEAN)
    for want, have in zip(expected, _through(module, x, cotangent), strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        assert (have - want).abs().max() <= tolerance * want.abs().max()
    if dtype == torch.bfloat16:  # rounded at the same places
        assert torch.equal(expected[0], module(x).detach())


@pytest.mark.parametrize("kind", [NormKind(5, 1e-3, 0.0, True), NormKind(5, 1e-3, 1.0, False)])
def test_gradients_are_those_of_finite_differences(kind: NormKind) -> None:
    x = _random(3, 5, seed=4, dtype=torch.float64).requires_grad_()
    weight = _random(5, seed=5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: lean_rms_norm(x, w, kind), (x, weight))
    torch.testing.assert_close(lean_rms_norm(x, weight, kind), rms_norm(x, weight, kind))


def test_a_closed_form() -> None:
    kind = NormKind(2, 0.5, 0.0, True)
    out = lean_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0]), kind)
    root = (12.5 + 0.5) ** 0.5  # mean of 9 and 16, and eps
    torch.testing.assert_close(out, torch.tensor([[6.0 / root, -4.0 / root]]))


def test_one_of_the_two_may_need_no_gradient() -> None:
    kind = NormKind(6, 1e-5, 0.0, True)
    x, weight, cotangent = _random(4, 6, seed=6), _random(6, seed=7), _random(4, 6, seed=8)
    both = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    lean_rms_norm(*both, kind).backward(cotangent)
    for alone in range(2):
        leaves = [x.clone(), weight.clone()]
        leaves[alone].requires_grad_()
        lean_rms_norm(*leaves, kind).backward(cotangent)
        assert torch.equal(leaves[alone].grad, both[alone].grad)
        assert leaves[1 - alone].grad is None


def test_gradients_of_transposed_layouts() -> None:
    """q_norm's output is transposed before it is used, so its gradient comes with other strides."""
    module = _norm(Qwen3RMSNorm, 8)
    x, cotangent = _random(1, 6, 4, 8, seed=9), _random(1, 4, 6, 8, seed=10).transpose(1, 2)
    expected = _through(module, x, cotangent)
    _site(module, LEAN)
    for want, have in zip(expected, _through(module, x, cotangent), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_input_and_a_number_a_row_are_kept(dtype: torch.dtype) -> None:
    module, x = _norm(LlamaRMSNorm, 64, dtype), _random(1, 50, 64, seed=11, dtype=dtype).requires_grad_()
    eager = saved_bytes(lambda: module(x), but=[x, module.weight])
    _site(module, LEAN)
    assert saved_bytes(lambda: module(x), but=[x, module.weight]) == 50 * 4  # rstd, fp32
    assert eager >= 50 * 64 * dtype.itemsize


def test_torch_s_own_gives_the_same() -> None:
    kind, x, weight = NormKind(16, 1e-6, 0.0, True), _random(7, 16, seed=12), _random(16, seed=13)
    torch.testing.assert_close(torch_rms_norm(x, weight, kind), rms_norm(x, weight, kind))


class _Block(torch.nn.Module):
    """A norm and layers that read it, one of them through a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = _norm(LlamaRMSNorm)
        self.first, self.second, self.third = (torch.nn.Linear(24, n) for n in (24, 10, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return torch.cat([self.first(normed), self.second(normed), self.third(normed.clone())], dim=-1)


def test_layers_that_read_a_norm_make_its_output_again() -> None:
    torch.manual_seed(0)
    block, cotangent = _Block(), _random(1, 40, 58, seed=15)
    x = _random(1, 40, 24, seed=14).requires_grad_()
    names = [name for name, _ in block.named_parameters()]

    def through() -> list[torch.Tensor]:
        return [*torch.autograd.grad(block(x), [x, *block.parameters()], cotangent)]

    expected, out = through(), block(x)
    eager = saved_bytes(lambda: block(x), but=[x, *block.parameters()])
    (site,) = find_norms(block).sites
    by_name = {implementation.name: implementation for implementation in RMS_NORM.implementations}
    by_name["lean_linear"].install(site)
    torch.testing.assert_close(block(x), out)
    for name, want, have in zip(["x", *names], expected, through(), strict=True):
        torch.testing.assert_close(have, want, msg=lambda text, name=name: f"{name}: {text}")
    lean = saved_bytes(lambda: block(x), but=[x, *block.parameters()])
    assert lean == 40 * 4 + 40 * 24 * 4  # a number a row, and the copy
    assert eager >= lean + 2 * 40 * 24 * 4


class _ShiftedRMSNorm(LlamaRMSNorm):
    shift = 0.0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.shift


def test_norms_of_a_class_are_told_apart_by_their_settings() -> None:
    model = torch.nn.ModuleList(_ShiftedRMSNorm(24, eps=1e-5) for _ in range(2))
    model[1].shift = 0.5
    found = find_norms(model)
    assert [site.name for site in found.sites] == ["0"] and found.strangers[0].startswith("1 ")


class _Scaled(_Block):
    """What the layers read was changed in place: it is no output of the norm any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        normed *= 3
        return self.first(normed)


def _with_readers(block: torch.nn.Module) -> torch.nn.Module:
    (site,) = find_norms(block).sites
    next(i for i in RMS_NORM.implementations if i.name == "lean_linear").install(site)
    return block


def test_an_output_that_is_changed_in_place_is_kept_as_it_was_read() -> None:
    block, x, cotangent = _Scaled(), _random(1, 5, 24, seed=17), _random(1, 5, 24, seed=18)
    wanted = [block.norm.weight, block.first.weight]
    expected = torch.autograd.grad(block(x), wanted, cotangent)
    found = torch.autograd.grad(_with_readers(block)(x), wanted, cotangent)
    torch.testing.assert_close(found, expected)


def test_what_was_made_again_is_let_go_though_a_reader_is_frozen() -> None:
    """Frozen, it does not read, and would be waited for as long as the graph lives."""
    block, x = _with_readers(_Block()), _random(1, 5, 24, seed=17)
    block.second.weight.requires_grad_(False)
    normed = block.norm(x)
    again = normed.normalised_from.again
    sum(layer(normed).sum() for layer in (block.first, block.second, block.third)).backward()
    assert again.readers == 0 and again.made is None


def test_a_norm_that_no_layer_reads_leaves_nothing() -> None:
    block = _Block()
    block.first = block.second = block.third = torch.nn.Identity()
    (site,) = find_norms(block).sites
    next(i for i in RMS_NORM.implementations if i.name == "lean_linear").install(site)
    out = block.norm(_random(1, 3, 24, seed=16))
    assert out.requires_grad and not hasattr(out, "normalised_from")


def test_without_gradients_nothing_is_left_on_a_norm_s_output() -> None:
    block = _Block()
    (site,) = find_norms(block).sites
    next(i for i in RMS_NORM.implementations if i.name == "lean_linear").install(site)
    with torch.no_grad():
        assert not hasattr(block.norm(_random(1, 3, 24, seed=16)), "normalised_from")
