"""Experts: what transformers' switch is set to, and our own grouped forward against the family's loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.models import tiny_config
from transformers import AutoModelForCausalLM

from shardyard.config import OptimizationConfig
from shardyard.errors import UserError
from shardyard.ops.apply import apply_operators
from shardyard.ops.experts import EXPERTS, find_experts, sorted_experts
from shardyard.ops.registry import Row, Situation
from shardyard.ops.self_check import greatest_difference

CPU = Situation(torch.device("cpu"), torch.float32)
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")


def _model(family: str, **overrides: Any) -> Any:
    config = tiny_config(family)
    for key, value in overrides.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _row(model: Any, wish: Any = "auto", situation: Situation = CPU) -> Row:
    rows = apply_operators(model, OptimizationConfig(moe_grouped_gemm=wish), situation)
    return next(row for row in rows if row.operation == "experts")


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_and_true_are_one_product_and_false_is_the_family_s_loop(family: str) -> None:
    model = _model(family)
    assert _row(model).runs == "grouped_mm"
    assert model.config._experts_implementation == "grouped_mm"
    assert _row(model, True).runs == "grouped_mm"
    assert _row(model, False).runs == "eager"
    assert model.config._experts_implementation == "eager"


def test_sizes_that_the_kernel_does_not_take_run_one_by_one() -> None:
    model = _model("qwen3_moe", moe_intermediate_size=23)
    row = _row(model)
    assert row.runs == "eager" and "23" in row.why and "16 bytes" in row.why
    assert model.config._experts_implementation == "eager"
    with pytest.raises(UserError, match=r"moe_grouped_gemm: true cannot be had .*16 bytes"):
        _row(model, True)


def test_a_dense_model_has_none() -> None:
    assert _row(_model("qwen3")) == Row("experts", "eager", "this model has no experts")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_sees_a_wrong_weight(family: str, dtype: torch.dtype) -> None:
    (site, *_) = find_experts(_model(family)).sites
    example = EXPERTS.example(site, dataclasses.replace(CPU, dtype=dtype))
    grouped = EXPERTS.implementations[0].run(site)
    assert greatest_difference(example, grouped) < (2e-5 if dtype == torch.float32 else 4e-2)

    def wrong(hidden: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return grouped(hidden, weights.flip(1), *rest)

    assert greatest_difference(example, wrong) > 0.1


def test_our_sorted_forward_equals_the_family_s_loop() -> None:
    """With PyTorch's grouped product in place of Ascend's, which cannot run here."""
    (site, *_) = find_experts(_model("qwen3_moe")).sites
    example = EXPERTS.example(site, CPU)

    def product(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ w for part, w in zip(rows.split(counts.tolist()), weight, strict=True)])

    def ours(hidden: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        from shardyard.ops.experts import _twin

        *parameters, index = rest
        names = [name for name, _ in site.kind.shapes]
        twin = _twin(site.module, dict(zip(names, parameters, strict=True)))
        return sorted_experts(twin, hidden, index, weights, product)

    assert greatest_difference(example, ours) < 1e-5
