"""The pattern language of module names."""

from __future__ import annotations

import logging

import pytest
import torch.nn as nn

from shardyard.errors import UserError
from shardyard.parallel import matches, select, select_modules


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.{*}", "model.layers.12", True),
        ("model.layers.{*}", "model.layers.12.mlp", False),
        ("model.layers.{*}", "model.layers.x", False),
        ("model.layers.{2-11}", "model.layers.11", True),
        ("model.layers.{2-11}", "model.layers.1", False),
        ("model.layers.{2-11}", "model.layers.12", False),
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("*lm_head", "lm_head", True),
        ("model.norm?", "model.norm2", True),
        ("model.norm?", "model.norm", False),
        ("a.b", "aXb", False),
        ("h[0]", "h[0]", True),
    ],
)
def test_a_pattern_names_a_whole_name(pattern, name, expected):
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["layers.{a}", "layers.{1,2}", "layers.{", "layers.}", "layers.{}"])
def test_other_braces_are_refused_with_the_pattern(pattern):
    with pytest.raises(UserError, match="braces"):
        matches(pattern, "layers.1")


def test_a_list_that_matches_nothing_is_refused_with_the_names_that_exist():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"parallel\.fsdp_modules: nope matches nothing.*\{\*\}"):
        select_modules(model, ["nope"], key="parallel.fsdp_modules")


def test_one_pattern_without_a_match_warns(caplog):
    with caplog.at_level(logging.WARNING, "shardyard.parallel"):
        assert select(["a", "zzz"], ["a", "b"], key="k") == ["a"]
    assert "zzz" in caplog.text
