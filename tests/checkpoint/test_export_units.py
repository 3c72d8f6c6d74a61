"""What is turned back in parts is what transformers makes of the whole; what cannot be cut is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import FAMILIES, tiny_config
from transformers.core_model_loading import revert_weight_conversion

from shardyard.checkpoint import turning_back
from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.hf_files import plan_files
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.pieces import Box, pieces_of
from shardyard.checkpoint.streaming import Stream, Task
from shardyard.checkpoint.turning_back import Unit, units_of
from shardyard.errors import UserError

Tensors = dict[str, torch.Tensor]


def numbered(facts: dict[str, tuple[int, ...]]) -> Tensors:
    """Tensors in which every number is another one."""
    start, found = 0, {}
    for name, shape in facts.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return found


def in_parts(model: Any, units: list[Unit], tensors: Tensors, step: int) -> Tensors:
    """All units turned back, those of rows ``step`` rows at a time."""
    found: Tensors = {}
    for unit in units:
        inputs = {name: tensors[name] for name in unit.inputs}
        if unit.form != "rows":
            found |= unit.turned_back(model, inputs)
            continue
        (name,) = unit.inputs
        for start in range(0, len(tensors[name]), step):
            found |= unit.turned_back(model, {name: tensors[name][start : start + step]}, start)
    return found


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_parts_make_what_the_whole_makes(family: str) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
    tensors = numbered({name: tuple(t.shape) for name, t in model.state_dict().items()})
    wanted = revert_weight_conversion(model, dict(tensors))
    units = units_of(model, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
    moe = any("experts" in name for name in tensors) and family != "gpt_oss"
    assert {unit.form for unit in units} == ({"same", "rows"} if moe else {"same"})
    for step in (1, 3):
        found = in_parts(model, units, tensors, step)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def joined(tensors: Tensors) -> Tensors:
    """Q and k of a layer are one tensor on disk."""
    found = {name: tensor for name, tensor in tensors.items() if ".q" not in name and ".k" not in name}
    for name, tensor in tensors.items():
        if ".q" in name:
            found[name.replace(".q", ".qk")] = torch.cat((tensor, tensors[name.replace(".q", ".k")]))
    return found


def reversed_rows(tensors: Tensors) -> Tensors:
    """Expert i of the model is the one before the i-th last on disk, so that rows depend on their number."""
    return {
        f"{name}.{row}.w": tensor[len(tensor) - 1 - row] for name, tensor in tensors.items()
        for row in range(len(tensor))
    }  # fmt: skip


def transposed(tensors: Tensors) -> Tensors:
    """One to one, of the same shape where it is square, and other numbers."""
    return {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def by_row(tensors: Tensors) -> Tensors:
    return {f"{name}.{n}.w": row for name, tensor in tensors.items() for n, row in enumerate(tensor)}


@pytest.mark.parametrize(
    ("convert", "shapes", "forms"),
    [
        (joined, {"a.0.q": (2, 3), "a.0.k": (1, 3), "a.0.v": (1, 3), "n": (3,)}, ["whole", "same"]),
        (reversed_rows, {"a.0.e": (4, 3, 2)}, ["whole"]),
        (transposed, {"a.0.w": (3, 3), "a.1.w": (2, 3)}, ["whole", "whole"]),
        (by_row, {"a.0.e": (3, 2, 4), "a.1.e": (3, 2, 4)}, ["rows", "rows"]),
    ],
)
def test_the_form_is_found_by_trying_and_the_files_hold_the_whole_conversion(
    tmp_path: Path,
    convert: Callable[[Tensors], Tensors],
    shapes: dict[str, tuple[int, ...]],
    forms: list[str],
) -> None:
    from safetensors.torch import load_file

    tensors = numbered(shapes)
    facts = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    model = SimpleNamespace(config=SimpleNamespace(model_type="made up"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turning_back, "revert_weight_conversion", lambda _, given: convert(given))
        units = units_of(model, facts)
        assert [unit.form for unit in units] == forms
        plan = plan_files({name: kind for unit in units for name, kind in unit.facts.items()}, 50)
        peers = Peers()
        task = Task(
            units=units, shapes=shapes, dtypes={name: dtype for name, (_, dtype) in facts.items()},
            pieces=pieces_of(tensors, Holdings.of(tensors, peers), peers), plan=plan, aliases={},
            owners=[0] * len(plan.files), job_bytes=20,
        )  # fmt: skip
        Stream(task, tensors, model, peers, tmp_path).run("a test")
    found = {key: t for path in tmp_path.iterdir() for key, t in load_file(path).items()}
    wanted = convert(tensors)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def over_layers(tensors: Tensors) -> Tensors:
    """One tensor on disk of all layers together."""
    return {"all": torch.stack(list(tensors.values()))}


def test_layers_that_are_one_tensor_on_disk_are_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="made up"))
    facts = {f"a.{n}.w": ((2, 2), torch.float32) for n in range(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turning_back, "revert_weight_conversion", lambda _, given: over_layers(given))
        with pytest.raises(UserError, match="made up model cannot be turned back one by one"):
            units_of(model, facts)


def grid(*cuts: list[tuple[int, int]]) -> list[Box]:
    """Boxes of all fields that (start, length) along each dimension make."""
    fields = itertools.product(*cuts)
    return [Box(tuple(s for s, _ in field), tuple(n for _, n in field)) for field in fields]


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        (grid([(0, 2), (2, 1)], [(0, 4)]), True),
        (grid([(0, 2), (2, 1)], [(0, 1), (1, 3)]), True),
        (grid([(0, 2)], [(0, 4)]), False),
        (grid([(0, 2), (1, 2)], [(0, 4)]), False),
        (grid([(0, 2), (2, 1)], [(0, 1), (1, 3)])[:-1], False),
        (grid([(0, 3), (3, 1)], [(0, 4)]), False),
        ([], False),
    ],
)
def test_shards_make_the_whole_or_are_a_fault(boxes: list[Box], whole: bool) -> None:
    """Of a tensor [3, 4], each shard on a rank of its own."""

    class Others:
        rank = 0

        def gather(self, mine: Any) -> list[Any]:
            return [{"w": box} for box in boxes]

    holdings = Holdings({"w": ((3, 4), torch.float32)}, {"w": 0}, (0,) * len(boxes))
    peers: Any = Others()
    if whole:
        assert [piece.box for piece in pieces_of({}, holdings, peers)["w"]] == boxes
        return
    with pytest.raises(RuntimeError, match="the shards of w"):
        pieces_of({}, holdings, peers)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (Box((0, 0), (2, 4)), Box((1, 2), (3, 2)), Box((1, 2), (1, 2))),
        (Box((0, 0), (2, 4)), Box((2, 0), (1, 4)), None),
        (Box((0, 0), (2, 4)), Box((1, 1), (0, 2)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_what_two_boxes_share(one: Box, other: Box, common: Box | None) -> None:
    assert one.overlap(other) == common and other.overlap(one) == common
