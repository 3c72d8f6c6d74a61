"""Parameter groups: who is in which, with what rate and decay; and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardyard.config import TrainingConfig
from shardyard.config.parameter_groups import group_rules
from shardyard.errors import UserError
from shardyard.optim import group_lines, group_parameters, set_lr
from shardyard.optim.adamw import build
from shardyard.optim.algorithms import Setup


def training_with(*entries: dict, **more) -> TrainingConfig:
    return TrainingConfig(output_dir="x", lr=1e-3, weight_decay=0.1, parameter_groups=entries or None, **more)


def model() -> torch.nn.Module:
    """Two layers of a matrix and a norm, between an embedding and a head that are tied."""
    embed, head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({"proj": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}) for _ in range(3)
    )
    return torch.nn.ModuleDict({"embed": embed, "layers": layers, "head": head})


def found(*entries: dict, **more) -> dict[str, Any]:
    """Parameter -> (rate at a schedule's 1e-3, decay), as torch's optimizer has it after `set_lr`."""
    training, built = training_with(*entries, **more), model()
    optimizer = build(group_parameters(built, training), Setup(training, built))
    set_lr(optimizer, 1e-3)
    return {
        name: (pytest.approx(group["lr"]), group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_without_entries_matrices_decay_and_vectors_do_not():
    got = found()
    assert len(got) == 1 + 3 * 4
    assert got["embed.weight"] == got["layers.0.proj.weight"] == (1e-3, 0.1)
    assert got["layers.0.proj.bias"] == got["layers.0.norm.weight"] == (1e-3, 0.0)
    assert found(decay_norm_and_bias=True)["layers.2.norm.bias"] == (1e-3, 0.1)


def test_the_first_entry_that_matches_counts():
    got = found(
        {"patterns": ["layers.{0-1}.*"], "lr_scale": 0.5},
        {"patterns": "layers.{*}.proj.*", "lr": 4e-3, "weight_decay": 0.3},
    )
    assert got["layers.1.proj.weight"] == (5e-4, 0.1)
    assert got["layers.1.norm.weight"] == (5e-4, 0.0)
    assert got["layers.2.proj.weight"] == (4e-3, 0.3)
    assert got["layers.2.proj.bias"] == (4e-3, 0.0)  # vectors do not decay
    assert got["layers.2.norm.weight"] == (1e-3, 0.0)


def test_the_schedule_scales_each_group_by_its_own_factor():
    training, built = training_with({"patterns": ["embed*"], "lr": 3e-3}), model()
    optimizer = build(group_parameters(built, training), Setup(training, built))
    for rate in (1e-3, 5e-4, 0.0):
        set_lr(optimizer, rate)
        assert optimizer.param_groups[0]["param_names"] == ["embed.weight"]
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([3 * rate, rate, rate])


def test_layer_wise_decay_goes_through_entries():
    entries = [{"patterns": [f"layers.{n}.*"], "lr_scale": 0.9 ** (3 - n)} for n in range(3)]
    got = found(*entries)
    assert [got[f"layers.{n}.proj.weight"][0] for n in range(3)] == pytest.approx([7.29e-4, 8.1e-4, 9e-4])


def test_a_tied_parameter_answers_to_each_of_its_names():
    assert found({"patterns": ["head.*"], "lr_scale": 2.0})["embed.weight"] == (2e-3, 0.1)


def test_a_pattern_that_matches_nothing_is_refused():
    entry = {"patterns": ["layers.*", "layer.{*}.proj.weight"], "lr_scale": 2.0}
    with pytest.raises(
        UserError, match=r"parameter_groups: layer\.\{\*\}\.proj\.weight of entry 1 matches no"
    ):
        group_parameters(model(), training_with(entry))


def test_the_lines_tell_counts_and_leave_out_empty_groups():
    groups = group_parameters(model(), training_with({"patterns": ["*norm*"], "lr_scale": 2.0}))
    counts = [(len(group.named), sum(p.numel() for _, p in group.named)) for group in groups]
    lines = group_lines(groups, counts)
    assert [" ".join(line.split()) for line in lines] == [
        "*norm* (norms and biases) lr x 2, weight decay 0: 6 parameters of 24 elements",
        "others lr x 1, weight decay 0.1: 4 parameters of 68 elements",
        "others (norms and biases) lr x 1, weight decay 0: 3 parameters of 12 elements",
    ]


def test_an_entry_that_trains_nothing_is_told():
    """Its parameters all go by the one before it, or are frozen."""
    entries = ({"patterns": "layers.*", "lr_scale": 2.0}, {"patterns": "layers.0.*", "lr_scale": 0.5})
    groups = group_parameters(model(), training_with(*entries, {"patterns": "*", "weight_decay": 0}))
    lines = group_lines(groups, [(len(group.named), len(group.named)) for group in groups])
    (told,) = [line for line in lines if "trains nothing" in line]
    assert told.startswith("layers.0.* ") and "frozen, or of an entry above" in told


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"pattern": ["a"], "lr": 1.0}, "has the key 'pattern'"),
        ({"lr": 1.0}, "needs patterns"),
        ({"patterns": [], "lr": 1.0}, "needs patterns"),
        ({"patterns": [1], "lr": 1.0}, "needs patterns"),
        ({"patterns": 5, "lr": 1.0}, "needs patterns"),
        ({"patterns": {"a": 1}, "lr": 1.0}, "needs patterns"),
        ({"patterns": ["a", "layers.{0,1}.*"], "lr": 1.0}, r"in 'layers.\{0,1\}.\*' braces hold"),
        ({"patterns": "layers.{}", "lr": 1.0}, "braces hold"),
        ({"patterns": "layers.0}", "lr": 1.0}, "braces hold"),
        ({"patterns": ["a"]}, "changes nothing"),
        ({"patterns": ["a"], "lr": 1.0, "lr_scale": 2.0}, "has lr and lr_scale"),
        ({"patterns": ["a"], "lr": -1.0}, "lr -1.0 is not a number"),
        ({"patterns": ["a"], "lr_scale": "2x"}, "lr_scale '2x' is not a number"),
        ({"patterns": ["a"], "weight_decay": True}, "weight_decay True is not a number"),
    ],
)
def test_entries_that_are_none_are_refused(entry, fault):
    with pytest.raises(ValueError, match=fault):
        group_rules(training_with(entry))


@pytest.mark.parametrize(
    "pattern", ["a", "*", "a?.{*}.b", "{0-3}", "{3-0}", "{}", "{a}", "{0,1}", "{0-}", "a{", "}", "{*}}"]
)
def test_a_pattern_is_read_as_it_is_matched(pattern):
    """The settings are read without torch, by an expression of their own."""
    from shardyard.parallel import matches

    training = training_with({"patterns": pattern, "lr_scale": 2.0})
    try:
        matches(pattern, "x")
    except UserError:
        with pytest.raises(ValueError, match="braces hold"):
            group_rules(training)
    else:
        assert group_rules(training)[0].patterns == (pattern,)


def test_a_rate_of_its_own_needs_one_to_scale():
    training = TrainingConfig(output_dir="x", lr=0.0, parameter_groups=({"patterns": ["a"], "lr": 1.0},))
    with pytest.raises(ValueError, match=r"goes by training.lr, and that is 0|training.lr is 0"):
        group_rules(training)
