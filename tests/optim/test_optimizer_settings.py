"""Settings of optimizers and schedules, as a YAML has them: read, refused, and told where they do nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from support.configs import fault_of, load

from shardyard.config import TrainingConfig
from shardyard.config.parameter_groups import GroupRule, group_rules


def test_groups_are_read_from_yaml_with_a_pattern_or_a_list_of_them(tmp_path):
    text = (
        "training:\n  lr: 1e-4\n  parameter_groups:\n"
        "    - {patterns: 'model.embed_tokens.*', lr: 2e-5}\n"
        "    - patterns: ['*norm*', 'model.layers.{0-3}.*']\n      lr_scale: 0.5\n      weight_decay: 0\n"
    )
    one, two = group_rules(load(tmp_path, text).config.training)
    assert (one.patterns, one.weight_decay) == (("model.embed_tokens.*",), None)
    assert one.lr_scale == pytest.approx(0.2)
    assert two == GroupRule(("*norm*", "model.layers.{0-3}.*"), 0.5, 0.0)


def test_groups_go_through_the_resolved_config_and_the_record_of_a_checkpoint(tmp_path):
    from shardyard.config.resolved import dump_yaml
    from shardyard.train.differences import RunFacts

    text = "training:\n  parameter_groups:\n    - {patterns: ['*norm*'], lr_scale: 0.5, weight_decay: 0}\n"
    loaded = load(tmp_path, text)
    dumped = dump_yaml(loaded.config, loaded.origins)
    (line,) = (line for line in dumped.splitlines() if "parameter_groups:" in line)
    again = load(tmp_path, f"training:\n{line}\n").config.training.parameter_groups
    assert again == loaded.config.training.parameter_groups
    facts = RunFacts.of(loaded.config)
    assert facts.config["training.parameter_groups"] == list(loaded.config.training.parameter_groups or ())


def test_an_entry_that_is_none_is_refused_where_it_stands(tmp_path):
    text = "training:\n  parameter_groups:\n    - {patterns: '*', lr: 1e-5, lr_scale: 2}\n"
    assert fault_of(tmp_path, text) == (
        "run.yaml:2:3  training.parameter_groups: entry 1 has lr and lr_scale; keep one"
    )


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw", "muon", "lion", "adam_mini"])
def test_every_optimizer_passes_the_check_with_its_defaults(tmp_path, optimizer):
    loaded = load(tmp_path, f"training: {{optimizer: {optimizer}}}")
    assert not [warning for warning in loaded.warnings if "optimizer" in warning]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "{muon_momentum: 0.9}",
            "training.muon_momentum: has no effect while training.optimizer is not muon",
        ),
        ("{optimizer: muon, lion_beta1: 0.8}", "while training.optimizer is not lion"),
        ("{optimizer: lion, adam_beta2: 0.8}", "adam_beta2: has no effect while training.optimizer is lion"),
        ("{lr_wsd_decay_ratio: 0.2}", "while training.lr_scheduler_type is not wsd"),
        ("{lr_num_cycles: 2}", "while training.lr_scheduler_type is not cosine_with_restarts"),
        ("{lr_power: 2}", "while training.lr_scheduler_type is not polynomial"),
        ("{lr_scheduler_type: constant_with_warmup, min_lr: 0}", "training.lr_scheduler_type is constant"),
    ],
)
def test_settings_of_another_optimizer_or_schedule_are_told(tmp_path, text, reason):
    warnings = load(tmp_path, f"training: {text}").warnings
    assert len([warning for warning in warnings if reason in warning]) == 1


def test_settings_of_the_chosen_one_are_not_told(tmp_path):
    text = "{optimizer: muon, adam_beta2: 0.9, lr_scheduler_type: wsd, lr_wsd_decay_ratio: 0.2}"
    assert not [w for w in load(tmp_path, f"training: {text}").warnings if "no effect" in w]


def test_the_page_of_optimizers_tells_what_is_there(tmp_path):
    """Its YAML loads, and its tables name every optimizer, every schedule and every default of Muon."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        group_rules(load(tmp_path, block).config.training)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    fields = TrainingConfig.model_fields
    for key in ("optimizer", "lr_scheduler_type"):
        for name in get_args(fields[key].annotation):
            assert any(f"`{name}`" in row.split("|")[1] for row in rows), name
    for key in (key for key in fields if key.startswith("muon_")):
        default = str(fields[key].default).lower()
        assert any(row.startswith(f"| `{key}` | {default} |") for row in rows), key
