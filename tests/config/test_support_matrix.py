"""The table of what goes together: the checker acts on each line of it, and on nothing else."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from support.configs import load

from shardyard.config import Loaded, layout_of
from shardyard.config.parallelism_tables import refreshed, support_table
from shardyard.config.support import AXES, EXCEPTIONS, FEATURES, NEVER, Verdict
from shardyard.errors import UserError

PACKAGE = Path(__file__).resolve().parents[2] / "shardyard"
_CP = {"parallel.cp_size": 2}
ASK: dict[str, dict[str, Any]] = {
    "tp": {"parallel.tp_size": 2},
    "pp": {"parallel.pp_size": 2, "parallel.pp_schedule": "gpipe"},
    "ep": {"parallel.ep_size": 2},
    "cp-ulysses": _CP,
    "cp-ring": {**_CP, "parallel.cp_type": "ring"},
    "cp-kvallgather": {**_CP, "parallel.cp_type": "kvallgather"},
    "hsdp": {"parallel.fsdp_size": 2},
    "ignored_modules": {"parallel.ignored_modules": "[model.norm]"},
    "activation_offload": {"parallel.activation_offload": "true"},
    "cpu_offload": {"parallel.cpu_offload": "true"},
    "recompute": {"parallel.recompute": "true"},
    "recompute_selective": {"parallel.recompute": "selective"},
    "accumulation": {"training.gradient_accumulation_steps": 4},
    "token_budget": {"training.max_tokens_per_micro_batch": 512},
    "group_by_length": {"training.group_by_length": "true"},
    "packing": {"data.packing": "true"},
    "cross_document_attention": {"data.cross_document_attention": "true", "data.packing": "true"},
    "streaming": {"data.streaming": "true", "training.max_steps": 5},
    "megatron": {"data.index_compat": "megatron", "data.data_manager_type": "mg", "training.stage": "pt"},
    "enable_chunk_batch": {
        "parallel.enable_chunk_batch": "true",
        "parallel.chunk_mbs_modules": "model.layers.{*}.self_attn",
    },
    "chunk_layers": {"parallel.enable_chunk_batch": "true"},
    "compile": {"optimization.compile": "block"},
    "compile_model": {"optimization.compile": "model"},
    "freeze": {"model.freeze": "[model.norm]"},
    "fix_router": {"optimization.fix_router": "true"},
    "router_aux_loss": {"training.router_aux_loss_coef": 0.01},
    "router_bias": {"training.router_bias_update_rate": 0.01},
    "shard_placement": {"parallel.shard_placement_fn": "shard_by_dim_0"},
    "no_reshard": {"parallel.reshard_after_forward": "false"},
    "reshard_to": {"parallel.reshard_after_forward": 2},
    "chunk_loss": {"optimization.chunk_loss_size": 7},
    "z_loss": {"training.z_loss_coef": 1e-4},
    "label_smoothing": {"training.label_smoothing": 0.1},
    "fp16": {"parallel.param_dtype": "fp16"},
    "small_states": {"training.optimizer_state_dtype": "bf16"},
    "no_adamw": {"training.optimizer": "lion"},
    "in_backward": {"training.optimizer_in_backward": "two_pass"},
    "whole_optimizer": {"training.optimizer": "muon"},
    "bf16_reduce": {"parallel.reduce_dtype": "bf16"},
    "parameter_groups": {"training.parameter_groups": '[{"patterns": "*norm*", "lr_scale": 0.5}]'},
    "validation": {"data.eval_dataset": "other"},
    "best": {
        "training.load_best_model_at_end": "true",
        "training.keep_best_checkpoint": "true",
        "data.eval_dataset": "other",
    },
    "attn_implementation": {"model.attn_implementation": "sdpa"},
    "attention_kernel": {"optimization.use_flash_attn": "flex"},
    "one_document": {"model_type": "mamba"},
    "sliding_window": {"sliding_window": 8},
    "attention_dropout": {"attention_dropout": 0.1},
    "dense": {"num_experts": 0},
}
"""How a run asks for each feature: a setting, or a value of its model's config.json."""
IMPLIED = {
    "best": {"validation"},
    "cross_document_attention": {"packing"},
    "chunk_layers": {"enable_chunk_batch"},
    "compile_model": {"compile"},
    "whole_optimizer": {"no_adamw"},
}
"""What a run with a feature uses besides."""
MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8,
    "vocab_size": 128, "use_sliding_window": True,
}  # fmt: skip
_ELSEWHERE = {("streaming", "megatron"), ("cross_document_attention", "megatron"), ("packing", "megatron")}
"""Pairs that rules of the data refuse: they are no matter of parallelism."""


def _load(tmp_path: Path, *features: str) -> Loaded:
    asked = {key: value for name in features for key, value in ASK[name].items()}
    model = MODEL | {key: value for key, value in asked.items() if "." not in key}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    words = [f"{key}={value}" for key, value in asked.items() if "." in key]
    return load(tmp_path, "", "data.dataset=some", *words, f"model.model_name_or_path={tmp_path}")


def _verdict(tmp_path: Path, one: str, other: str) -> str | None:
    """The reason that a run with both is given; None if it gets none."""
    try:
        loaded = _load(tmp_path, one, other)
    except UserError as error:
        return str(error)
    for idle in loaded.warnings:
        if "has no effect: " in idle:
            return idle
    try:
        layout_of(loaded.config, 8)
    except UserError as error:
        return str(error)
    return None


def test_every_feature_can_be_asked_for(tmp_path: Path) -> None:
    assert ASK.keys() == FEATURES.keys() and set(AXES) <= FEATURES.keys()
    for name, feature in FEATURES.items():
        loaded = _load(tmp_path, name)
        shape = layout_shape(loaded)
        assert feature.used(loaded.config, shape) == (name != "hsdp"), name
        others = IMPLIED.get(name, set())
        found = {other for other in FEATURES if FEATURES[other].used(loaded.config, shape)}
        assert found <= {name, *others}, (name, found)


def layout_shape(loaded: Loaded) -> Any:
    from shardyard.config import read_shape

    return read_shape(loaded.config.model)[0]


def _expected(one: str, other: str) -> Verdict | None:
    """The table's verdict of a pair, or of what these imply."""
    pairs = product([one, *sorted(IMPLIED.get(one, ()))], [other, *sorted(IMPLIED.get(other, ()))])
    found = [EXCEPTIONS.get(pair) or EXCEPTIONS.get((pair[1], pair[0])) for pair in pairs]
    return next((verdict for verdict in found if verdict is not None), None)


def test_each_pair_is_judged_as_the_table_says(tmp_path: Path) -> None:
    judged = 0
    for one, other in combinations(FEATURES, 2):
        cp_twice = one.startswith("cp-") and other.startswith("cp-")
        if cp_twice or (one, other) in _ELSEWHERE:
            continue
        expected = _expected(one, other)
        if expected is None and (one, other) == ("tp", "one_document"):
            continue  # mamba, its example, is refused by the rule of measured families
        found = _verdict(tmp_path, one, other)
        if expected is None or expected.kind == "in part":
            assert found is None, (one, other, found)
        elif expected.kind == "refused by a layout rule":
            assert found is not None and "try: " in found, (one, other)
        else:
            assert found is not None and expected.reason in found, (one, other, found)
        judged += 1
    assert judged > 390


def test_the_built_in_attention_may_be_named(tmp_path: Path) -> None:
    from shardyard.ops import DOCUMENTS_ATTENTION

    words = (f"model.attn_implementation={DOCUMENTS_ATTENTION}", "parallel.tp_size=2", "parallel.cp_size=2")
    assert load(tmp_path, "", "data.dataset=some", *words).config.parallel.cp_size == 2


def test_a_pair_with_replicas_is_refused_once_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXCEPTIONS, ("freeze", "hsdp"), Verdict("refused", "for this test"))
    config = _load(tmp_path, "freeze", "hsdp").config
    assert layout_of(config, 2).dp_replicate == 1
    with pytest.raises(UserError, match=r"model.freeze: freeze with replicas \(HSDP\) is refused: for this"):
        layout_of(config, 4)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        *((f"parallel.pp_schedule={name}", "wrong gradients with FSDP2")
          for name in ("zero_bubble", "zbv", "interleaved_zero_bubble", "dualpipe")),
        ("parallel.chunk_mbs_batch_dim=1", "one sequence"),
        ("parallel.hook_modules=[model]", "its own hooks"),
    ],
)  # fmt: skip
def test_values_that_are_never_possible_are_refused_with_the_reason(
    tmp_path: Path, setting: str, reason: str
) -> None:
    key, value = setting.split("=")
    assert key in {never.path for never in NEVER}
    with pytest.raises(UserError, match=rf"{key}: .*{value.strip('[]')}.* is refused: .*{reason}"):
        load(tmp_path, "", setting)


def test_dispatchers_of_npus_fall_back_with_one_line(tmp_path: Path) -> None:
    for name in ("fused", "mc2"):
        loaded = load(tmp_path, "", "data.dataset=x", "parallel.ep_size=2", f"parallel.ep_dispatcher={name}")
        (warning,) = loaded.warnings
        assert warning.endswith(f"parallel.ep_dispatcher: {name} is an operator of NPUs; eager is used")


def test_the_page_shows_each_feature_and_each_reason() -> None:
    lines = support_table()
    table = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert all(len(row) == len(AXES) + 1 for row in table)
    (sliding,) = (dict(zip(AXES, row[1:], strict=True)) for row in table if "sliding windows" in row[0])
    assert sliding["cp-ring"].strip().startswith("no (")
    assert {sliding[axis].strip() for axis in AXES if axis != "cp-ring"} == {"yes"}
    (plain,) = (line for line in lines if line.startswith("With every axis work: "))
    rows = {row[0].strip() for row in table}
    assert all((feature.title in rows) != (f" {feature.title}" in plain) for feature in FEATURES.values())
    text = "\n".join(lines)
    assert all(verdict.reason in text for verdict in EXCEPTIONS.values())
    assert all(never.reason in text for never in NEVER)


def test_only_marked_blocks_of_a_page_change() -> None:
    page = "a\n<!-- table: rules -->\nold\n<!-- end -->\nb\n<!-- table: other -->\nkept\n<!-- end -->\n"
    found = refreshed(page)
    assert found.startswith("a\n<!-- table: rules -->\n\n| setting | rule |") and "\nold\n" not in found
    assert found.endswith("<!-- end -->\nb\n<!-- table: other -->\nkept\n<!-- end -->\n")
    assert refreshed(found) == found
