"""A unit that one rank holds alone is used where it lies, and every number stays that of FSDP's own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.training import Outcome, Recipe, bits_of, make_rows, train_rows

CASES: dict[str, tuple[int, str, Recipe]] = {
    "tied": (1, "parity_dense", Recipe(accumulation=2)),
    "experts, recompute": (1, "parity_moe", Recipe(parallel={"recompute": True})),
    "kept after the forward": (1, "parity_dense", Recipe(parallel={"reshard_after_forward": False})),
    "TP 2": (2, "parity_dense", Recipe(parallel={"tp_size": 2}, accumulation=2)),
    "EP 2": (2, "parity_moe", Recipe(parallel={"ep_size": 2})),
    "PP 2": (2, "parity_moe", Recipe(parallel={"pp_size": 2}, accumulation=2)),
    "frozen": (1, "parity_dense", Recipe(model={"freeze": ["model.embed_tokens"]})),
    "bf16": (1, "parity_dense", Recipe(parallel={"param_dtype": "bf16"})),
    "offload": (1, "parity_dense", Recipe(parallel={"cpu_offload": True})),
}


def train_as_fsdp_does(folder: Path, rows: Any, recipe: Recipe) -> Outcome | None:
    from unittest import mock

    with mock.patch("shardyard.parallel.fsdp.use_in_place"):
        return train_rows(folder, rows, recipe)


def peak_and_places(folder: Path, rows: Any, recipe: Recipe, as_fsdp: bool) -> tuple[int, list[str]]:
    """Bytes that come to be in a forward and backward, at their peak; the parameters that are gathered into
    another place.
    """
    from contextlib import nullcontext
    from unittest import mock

    from support.live_memory import LivePeak
    from support.training import build_step, micro_batches_of
    from torch.distributed.fsdp import FSDPModule

    from shardyard.device import Device
    from shardyard.evaluate.forwards import forward_parts

    with mock.patch("shardyard.parallel.fsdp.use_in_place") if as_fsdp else nullcontext():
        built, _, _ = build_step(folder, recipe)
    (part,) = forward_parts(micro_batches_of(rows, 1, 0, 1)[0], 1, device=Device("cpu"), packed=True)
    with LivePeak() as live:
        built.model(**part).backward()
    units = [module for module in built.model.modules() if isinstance(module, FSDPModule)]
    parameters = [
        parameter
        for unit in units
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    ]
    return live.peak, [
        parameter._module_info.param_name
        for parameter in parameters
        if parameter._unsharded_param.data_ptr() != parameter._sharded_param_data.data_ptr()
    ]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_bit_for_bit_those_of_gathering(ranks, model_zoo, name):
    world, family, recipe = CASES[name]
    arguments = (model_zoo.folder(family), make_rows(), recipe)
    ours = ranks.run(world, train_rows, *arguments)[0]
    theirs = ranks.run(world, train_as_fsdp_does, *arguments)[0]
    assert bits_of(ours) == bits_of(theirs)


def test_nothing_is_gathered_and_no_gradient_is_copied(ranks, model_zoo):
    one_target = [([5, 6], [6, -100])]
    arguments = (model_zoo.folder("parity_dense"), one_target)
    ours, elsewhere = ranks.run(1, peak_and_places, *arguments, Recipe(), False)[0]
    theirs, copied = ranks.run(1, peak_and_places, *arguments, Recipe(), True)[0]
    assert elsewhere == []
    assert len(copied) > 40
    layer = 4 * (64 * 32 + 2 * 32 * 32 + 32 * 64 + 2 * 8 + 2 * 32 + 3 * 56 * 32)
    assert theirs - ours >= layer  # the copy from which one unit's gradients would be reduced


def test_what_is_cast_is_copied(ranks, model_zoo):
    recipe = Recipe(parallel={"param_dtype": "bf16"})
    _, copied = ranks.run(1, peak_and_places, model_zoo.folder("parity_dense"), make_rows(2), recipe, False)[
        0
    ]
    assert len(copied) > 40
