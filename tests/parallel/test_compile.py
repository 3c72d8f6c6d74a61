"""optimization.compile: the numbers of eager code, and no compilation for another length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.parity import CELLS, recipe_of, reference_of, write_parity_model
from support.training import (
    Outcome,
    Recipe,
    build_step,
    largest_relative_difference,
    make_rows,
    samples_of,
    train_rows,
)

from shardyard.device import Device
from shardyard.errors import UserError
from shardyard.parallel import EAGER, Compilation, check_compiler

TOLERANCE = 1e-5
BLOCK, MODEL = ("block", "eager"), ("model", "eager")
"""Graphs are made as for any compiler, and then run by torch: what depends on tracing is tested so."""
PATIENCE_S = 900.0
"""A busy machine compiles slowly; the limit is there for ranks that hang."""
BY_NAME = {cell.name: cell for cell in CELLS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("compiled")
    return {family: write_parity_model(root / family, family) for family in ("dense", "moe")}


@pytest.fixture(scope="module")
def references(ranks, folders):
    found: dict[str, Outcome] = {}

    def reference(family: str) -> Outcome:
        if family not in found:
            found[family] = ranks.run(
                1, train_rows, folders[family], make_rows(), _calm(reference_of("plain"))
            )[0]
        return found[family]

    return reference


def _calm(recipe: Recipe) -> Recipe:
    """Adam's first steps divide by the gradient: with less epsilon its rounding is all that is compared."""
    return replace(recipe, training=recipe.training | {"adam_epsilon": 3e-4})


def _assert_equal(ours: Outcome, reference: Outcome) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= TOLERANCE
    assert largest_relative_difference(ours.weights, reference.weights) <= TOLERANCE


SAMPLE = {("EP 2 on FSDP 2", "moe", "all", BLOCK)}
"""Nearly all in one case: shards, experts on two ranks, a layer without, accumulation, recomputation."""
LAYOUTS = (
    "FSDP 2", "HSDP 2x2", "CP ulysses 2", "CP ring 2", "PP 2", "PP 2 interleaved", "EP 2 on FSDP 2",
    "CP 2 with EP 2",
)  # fmt: skip
CASES = [
    (name, family, variant, compiled)
    for name in LAYOUTS
    for family in BY_NAME[name].families
    for variant in ("plain", "accumulation", "recompute", "all")
    for compiled in (BLOCK, MODEL)
    if compiled == BLOCK or (variant in ("plain", "accumulation") and "PP" not in name)
]


@pytest.mark.parametrize(
    ("name", "family", "variant", "compiled"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{case[1]}-{case[2]}-{case[3][0]}",
            marks=() if case in SAMPLE else pytest.mark.soak,
        )
        for case in CASES
    ],
)  # fmt: skip
def test_a_compiled_run_has_the_numbers_of_one_eager_process(
    ranks, folders, references, name, family, variant, compiled
):
    cell = BY_NAME[name]
    recipe = replace(_calm(recipe_of(cell, variant)), compile=compiled)
    if variant == "all":  # the reference does not clip
        recipe = replace(recipe, training=recipe.training | {"max_grad_norm": 1e9})
    ours = ranks.run(cell.world, train_rows, folders[family], make_rows(), recipe, timeout_s=PATIENCE_S)[0]
    _assert_equal(ours, references(family))


NUMBERS = ([0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14], [2, 1, 0], [15])
"""Rows of seven micro-batches: several documents and one, lengths that were there and that were not."""


def _losses_and_graphs(folder: Path, compiled: tuple[Any, str]) -> list[tuple[float, int]]:
    """The loss of each micro-batch, one a step, and how many graphs there are after it; last, of a forward
    without gradients.
    """
    import torch
    from torch._dynamo.utils import counters

    from shardyard.data.batches import collate

    built, step, _ = build_step(folder, Recipe(compile=compiled))
    samples = samples_of(make_rows(24, seed=3, empty=-1))
    found = []
    for index, rows in enumerate(NUMBERS):
        result = step([collate([samples[i] for i in rows], rows, 0)], step=index + 1, lr=1e-3)
        found.append((result.loss, counters["stats"]["unique_graphs"]))
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        loss = built.model(ids, torch.arange(11)[None], ids, (6, 5))
    return [*found, (loss.item(), counters["stats"]["unique_graphs"])]


@pytest.mark.parametrize("mode", ["block", pytest.param("model", marks=pytest.mark.soak)])
def test_neither_lengths_nor_numbers_of_documents_compile_anew(ranks, folders, mode):
    ((*trained, evaluated),) = ranks.run(
        1, _losses_and_graphs, folders["dense"], (mode, "eager"), timeout_s=PATIENCE_S
    )
    ((*eager, eager_evaluated),) = ranks.run(1, _losses_and_graphs, folders["dense"], ("none", "eager"))
    losses, graphs = zip(*trained, strict=True)
    assert losses == pytest.approx([loss for loss, _ in eager], rel=TOLERANCE)
    assert eager_evaluated[1] == 0 and evaluated[0] == pytest.approx(eager_evaluated[0], rel=TOLERANCE)
    # Before and after its attention each of the four layers has a graph at least: they share them.
    assert 2 <= graphs[0] < 8
    # The attention of one document gives a tensor that lies otherwise in memory: that may be one graph more.
    assert graphs[1] - graphs[0] <= 1 and set(graphs[1:]) == {graphs[1]}
    assert evaluated[1] == graphs[-1]  # a forward without gradients compiles nothing


@pytest.mark.soak
@pytest.mark.parametrize(("mode", "recompute"), [("block", False), ("block", True), ("model", False)])
def test_the_real_compiler_gives_the_numbers_of_eager_code(ranks, folders, references, mode, recompute):
    recipe = replace(
        _calm(reference_of("plain")), compile=(mode, "inductor"), parallel={"recompute": recompute}
    )
    _assert_equal(
        ranks.run(1, train_rows, folders["dense"], make_rows(), recipe, timeout_s=PATIENCE_S)[0],
        references("dense"),
    )


def test_a_cpu_without_a_compiler_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"^optimization.compile: block needs a C\+\+ compiler on a CPU, .*g\+\+"
    ):
        check_compiler(Compilation("block"), Device("cpu"))
    check_compiler(EAGER, Device("cpu"))
    compiler = tmp_path / "my-compiler"
    compiler.write_text("", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"needs Python's headers on a CPU, and there is no .*Python\.h"):
        check_compiler(Compilation("model"), Device("cpu"))
    (tmp_path / "Python.h").write_text("", encoding="utf-8")
    check_compiler(Compilation("model"), Device("cpu"))


def test_an_accelerator_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    specs: dict[str, Any] = {"triton": None}
    monkeypatch.setattr("shardyard.parallel.compile.find_spec", specs.__getitem__)
    with pytest.raises(UserError, match="block needs the package triton, which is not installed"):
        check_compiler(Compilation("block"), Device("cuda"))
    specs["triton"] = object()
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"block needs a C compiler for triton, and there is no .*absent"):
        check_compiler(Compilation("block"), Device("cuda"))
    (tmp_path / "absent").write_text("", encoding="utf-8")
    (tmp_path / "absent").chmod(0o755)
    check_compiler(Compilation("block"), Device("cuda"))


def test_a_model_of_which_nothing_would_be_compiled_is_refused() -> None:
    import torch
    from torch import nn

    from shardyard.parallel.compile import apply_compile

    experts, layer, body, model = (nn.Module() for _ in range(4))
    experts.num_experts, experts.weight = 2, nn.Parameter(torch.zeros(2, 3, 4))
    layer.experts, body.layers, model.model = experts, nn.ModuleList([layer]), body
    with pytest.raises(UserError, match="the layers of Module hold their experts themselves"):
        apply_compile(model, Compilation("block"))
