"""Rotary positions: what a family's function does, and ours against it in value and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from support.models import tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3

from shardyard.ops.registry import Situation
from shardyard.ops.rotary import ROTARY, TURNS, Turn, _as_called, _turn_of, find_rotary, lean_rotary
from shardyard.ops.self_check import fault_of

# (module, name of its function, what it does, width of a head, width of the cosines)
HALVES, WHOLE, PAIRS, GLM, DEEPSEEK = TURNS
FUNCTIONS = [
    (modeling_llama, "apply_rotary_pos_emb", HALVES, 8, 8),
    (modeling_qwen3, "apply_rotary_pos_emb", HALVES, 8, 8),
    (modeling_olmo2, "apply_rotary_pos_emb", HALVES, 8, 8),
    (modeling_glm4_moe, "apply_rotary_pos_emb", HALVES, 12, 8),
    (modeling_glm4, "apply_rotary_pos_emb", GLM, 12, 8),
    (modeling_cohere2, "apply_rotary_pos_emb", PAIRS, 8, 8),
    (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", DEEPSEEK, 8, 8),
    (modeling_gpt_oss, "apply_rotary_pos_emb", WHOLE, 8, 4),
]
IDS = ["llama", "qwen3", "olmo2", "glm4_moe", "glm4", "cohere2", "deepseek_v3", "gpt_oss"]


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _through(function: Any, inputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.parametrize(("module", "name", "turn", "width", "table_width"), FUNCTIONS, ids=IDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradients_are_the_family_s(
    module: Any, name: str, turn: Turn, width: int, table_width: int, dtype: torch.dtype, tolerance: float
) -> None:
    theirs = getattr(module, name)
    assert _turn_of(theirs) == turn
    q, k = (_random(1, 5, heads, width, seed=heads, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (_random(1, 5, table_width, seed=seed, dtype=dtype) for seed in (7, 8))
    cotangents = [_random(*x.shape, seed=9, dtype=dtype) for x in (q, k)]
    expected = _through(lambda q, k: theirs(q, k, cos, sin), [q, k], cotangents)
    found = _through(lambda q, k: lean_rotary(q, k, cos[:, None], sin[:, None], turn), [q, k], cotangents)
    for want, have in zip(expected, found, strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        assert (have - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("turn", TURNS)
def test_gradients_are_those_of_finite_differences(turn: Turn) -> None:
    q, k = (_random(1, heads, 3, 6, seed=heads, dtype=torch.float64).requires_grad_() for heads in (2, 1))
    width = 2 if turn.table == "whole" else 4
    cos, sin = (_random(1, 1, 3, width, seed=seed, dtype=torch.float64) for seed in (3, 4))
    assert torch.autograd.gradcheck(lambda q, k: lean_rotary(q, k, cos, sin, turn), (q, k))


def test_a_closed_form() -> None:
    """A quarter turn takes (a, b) to (-b, a); the third and the last number form no pair and stay."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    angle = torch.tensor([[[[math.pi / 2, math.pi / 2]]]])
    out, _ = lean_rotary(x, x, angle.cos(), angle.sin(), HALVES)
    torch.testing.assert_close(out, torch.tensor([[[[-2.0, 1.0, 3.0, 4.0]]]]))


@pytest.mark.parametrize("family", ["qwen3", "llama_tied", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_model_s_attention_calls_ours_and_no_other_model_s_does(family: str) -> None:
    model, other = (AutoModelForCausalLM.from_config(tiny_config(family)).eval() for _ in range(2))
    other.load_state_dict(model.state_dict())
    tokens, positions = torch.arange(3, 12)[None], torch.arange(9)[None]
    arguments: dict[str, Any] = dict(input_ids=tokens, position_ids=positions, use_cache=False)
    expected = model(**arguments).logits
    sites = find_rotary(model).sites
    assert len(sites) == model.config.num_hidden_layers
    for site in sites:
        ROTARY.implementations[0].install(site)
    logits = model(**arguments).logits
    torch.testing.assert_close(logits, expected)
    assert "_RotateBackward" in _graph(logits)
    assert "_RotateBackward" not in _graph(other(**arguments).logits)


def test_a_part_that_the_attention_splits_off_is_tried_alone() -> None:
    """Phi and StableLM turn a part of a head by a function that takes just that part."""
    config = transformers.PhiConfig(
        hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=9,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    (site,) = find_rotary(model).sites
    assert (site.kind.width, site.kind.table_width) == (4, 4)
    here = Situation(torch.device("cpu"), torch.float32)
    assert fault_of(ROTARY, ROTARY.implementations[0], site, here) is None


class _PerLayer:
    """A config that raises where its layers differ, as those of some families do."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"{name} varies across layers")


def test_a_config_that_does_not_say_the_sizes_leaves_the_family_s_own_code() -> None:
    model: Any = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    model.model.layers[0].self_attn.config = _PerLayer()
    found = find_rotary(model)
    assert [site.name for site in found.sites] == ["model.layers.1.self_attn"]
    assert found.strangers[0].startswith("model.layers.0.self_attn ")


def _queries_alone(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """Of a family whose layers share keys."""
    if k is None:
        return modeling_llama.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim)[0], None
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def test_queries_may_be_turned_alone() -> None:
    ours = _as_called(lean_rotary, HALVES, _queries_alone)
    q, cos, sin = (_random(1, *shape, seed=11) for shape in ((2, 5, 8), (5, 8), (5, 8)))
    out, none = ours(q, None, cos, sin)
    assert none is None and torch.equal(out, _queries_alone(q, None, cos, sin)[0])


def test_a_function_of_another_form_is_not_known() -> None:
    assert _turn_of(lambda q, k, cos, sin: q) is None
    assert _turn_of(lambda q, k, cos, sin: {}["rope"]) is None


def _graph(tensor: torch.Tensor) -> set[str]:
    """The names of all nodes behind a tensor."""
    names, waiting, seen = set(), [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name().rpartition(".")[2])
        waiting += [parent for parent, _ in node.next_functions]
    return names
