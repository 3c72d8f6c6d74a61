"""Which implementation a switch takes, what it refuses, what falls back, and what is told."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, get_args

import pytest
import torch
import transformers as hf
from support.models import tiny_config

from shardyard.config import OptimizationConfig
from shardyard.config.schema import FIELDS
from shardyard.errors import UserError
from shardyard.ops import apply
from shardyard.ops.apply import OPERATIONS, apply_operators
from shardyard.ops.norms import RMS_NORM
from shardyard.ops.registry import Row, Situation
from shardyard.ops.table import operator_lines

BY_NAME = {implementation.name: implementation for implementation in RMS_NORM.implementations}
CPU = Situation(torch.device("cpu"), torch.float32)


def _model(family: str = "qwen3") -> Any:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(tiny_config(family))


def _rows(model: Any, situation: Situation = CPU, **switches: Any) -> dict[str, Row]:
    return {row.operation: row for row in apply_operators(model, OptimizationConfig(**switches), situation)}


def _replaced(model: Any) -> set[str]:
    """Ends of the names of modules whose forward is on the instance."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if "forward" in module.__dict__}


def test_auto_takes_what_is_lean_on_a_cpu() -> None:
    model = _model()
    rows = _rows(model)
    assert rows["rms_norm"].runs == "lean_linear" and rows["swiglu"].runs == "lean_down"
    assert _replaced(model) >= {
        "input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "mlp", "down_proj",
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "self_attn",
    }  # fmt: skip


def test_false_is_the_family_s_own_code() -> None:
    model = _model()
    rows = _rows(model, **{operation.switch: False for operation in OPERATIONS})
    assert {row.runs for row in rows.values()} == {"eager", "sdpa, of transformers"}
    assert _replaced(model) == set()


def test_true_takes_the_device_s_fused_operator() -> None:
    rows = _rows(_model(), use_fused_rmsnorm=True, use_fused_swiglu=True)
    assert rows["rms_norm"] == Row("rms_norm", "lean_linear", "optimization.use_fused_rmsnorm is true")
    assert rows["swiglu"].runs == "lean_down"


def test_a_named_implementation_runs_or_is_refused_with_the_reason() -> None:
    assert _rows(_model(), use_fused_swiglu="lean")["swiglu"].runs == "lean"
    with pytest.raises(UserError, match=r"use_fused_rmsnorm: liger cannot be had .*cuda, npu only.*auto"):
        _rows(_model(), use_fused_rmsnorm="liger")


def test_a_package_that_is_missing_is_named_and_the_next_is_tried() -> None:
    somewhere = dataclasses.replace(CPU, device=torch.device("cuda", 0))
    torch_own, liger = BY_NAME["torch"], BY_NAME["liger"]
    assert liger.missing(somewhere) == "liger-kernel is not installed"
    assert torch_own.missing(somewhere) is None
    assert [i.name for i in RMS_NORM.candidates("auto", "cuda")] == ["liger", "torch"]
    assert [i.name for i in RMS_NORM.candidates(True, "cuda")] == ["liger", "torch", "lean"]
    assert [i.name for i in RMS_NORM.candidates("auto", "somewhere")] == []


def _only(implementation: Any) -> Any:
    """RMSNorm with one implementation for a CPU."""
    name = implementation.name
    return dataclasses.replace(
        RMS_NORM, implementations=(implementation,), fused={"": (name,)}, automatic={"cpu": {name: "it wins"}}
    )


def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose numbers are a little wrong."""
    lean = BY_NAME["lean"]
    wrong = dataclasses.replace(lean, run=lambda site: lambda x, w: 1.001 * lean.run(site)(x, w))
    operation = _only(wrong)
    monkeypatch.setattr(apply, "OPERATIONS", (operation,))


def test_auto_falls_back_with_one_line_where_the_check_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _broken(monkeypatch)
    model = _model()
    with caplog.at_level(logging.WARNING):
        rows = _rows(model)
    assert rows["rms_norm"].runs == "eager" and "differs from the family's own code" in rows["rms_norm"].why
    assert len(caplog.records) == 1 and _replaced(model) == set()


def test_true_is_refused_where_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch)
    with pytest.raises(
        UserError, match=r"optimization.use_fused_rmsnorm: true cannot be had \(lean: it differs"
    ):
        _rows(_model(), use_fused_rmsnorm=True)


def test_a_kernel_that_raises_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(site: Any) -> Any:
        raise OSError("no such kernel\nfor this device")

    broken = dataclasses.replace(BY_NAME["lean"], run=run)
    monkeypatch.setattr(apply, "OPERATIONS", (_only(broken),))
    assert _rows(_model())["rms_norm"].why == "lean: its self-check failed: OSError: no such kernel"


def test_a_model_without_such_modules_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.WARNING):
        rows = _rows(model, use_fused_rmsnorm=True)
    assert rows["rms_norm"].runs == "eager" and "has no RMSNorm" in rows["rms_norm"].why
    assert "optimization.use_fused_rmsnorm has no effect" in caplog.text


def test_a_compiler_gets_the_family_s_own_code() -> None:
    rows = _rows(_model(), dataclasses.replace(CPU, compiled=True))
    assert rows["rms_norm"].runs == "eager" and "compiler" in rows["rms_norm"].why
    compiled = dataclasses.replace(CPU, compiled=True)
    assert _rows(_model(), compiled, use_fused_rmsnorm=True)["rms_norm"].runs == "eager"
    with pytest.raises(UserError, match="use_fused_rmsnorm: lean stands in a compiler's way"):
        _rows(_model(), compiled, use_fused_rmsnorm="lean")


def test_the_check_draws_from_no_generator_of_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    _rows(_model())
    assert torch.equal(torch.rand(2), expected)


def test_names_in_the_settings_are_those_of_the_registry() -> None:
    for operation in OPERATIONS:
        annotation = FIELDS[f"optimization.{operation.switch}"].annotation
        words = {word for part in get_args(annotation) for word in get_args(part)} - {"auto"}
        named = {implementation.name for implementation in operation.implementations}
        assert words == named, operation.name
        assert set(sum(operation.fused.values(), ())) <= named
        assert {name for chosen in operation.automatic.values() for name in chosen} <= named


def test_the_table() -> None:
    assert operator_lines([Row("rms_norm", "lean", "small"), Row("swiglu", "eager", "")]) == [
        "operation  runs   why", "rms_norm   lean   small", "swiglu     eager",
    ]  # fmt: skip
