"""How parameters are kept and gathered is the user's choice and changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn as nn
from support.models import write_tiny_model
from support.pipelines import joined, train_stages
from support.training import Outcome, Recipe, largest_relative_difference, make_rows, train_rows

from shardyard.config import ParallelConfig
from shardyard.parallel.fsdp import dense_placement, set_prefetch

TRAINING = {"adam_epsilon": 1e-4}
IGNORED = {"ignored_modules": ["model.layers.{*}.self_attn.q_proj", "model.layers.{0-0}.mlp", "model.norm"]}
IGNORED_BESIDE_EXPERTS = {"ignored_modules": ["model.layers.{*}.mlp.gate", "model.layers.{0-1}.self_attn"]}
BY_DIM_1 = {"shard_placement_fn": "shard_by_dim_1"}
NORMS_ALONE = {"fsdp_modules": ["model.layers.{*}", "model.layers.{*}.input_layernorm"]}
FAR = {"num_to_forward_prefetch": 3, "num_to_backward_prefetch": 2}
OFFLOAD = {"cpu_offload": True}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ignored, one rank": (1, "dense", IGNORED),
    "ignored, FSDP 2": (2, "dense", IGNORED),
    "ignored, FSDP 4": (4, "dense", IGNORED),
    "ignored, HSDP 2x2": (4, "dense", IGNORED | {"fsdp_size": 2}),
    "ignored, TP 2": (2, "dense", IGNORED | {"tp_size": 2}),
    "ignored, FSDP 2 x TP 2": (4, "dense", IGNORED | {"tp_size": 2}),
    "ignored, CP 2": (2, "dense", IGNORED | {"cp_size": 2}),
    "ignored, PP 2": (2, "dense", IGNORED | {"pp_size": 2}),
    "ignored in one stage, PP 2": (
        2, "dense", {"ignored_modules": ["model.layers.{0-0}.mlp"], "recompute": True, "pp_size": 2},
    ),
    "ignored and offload, PP 2 x FSDP 2": (4, "moe", IGNORED_BESIDE_EXPERTS | OFFLOAD | {"pp_size": 2}),
    "mlps in units of their own, recomputed, FSDP 2": (
        2, "dense",
        {"fsdp_modules": ["model.layers.{*}", "model.layers.{*}.mlp"], "recompute": True},
    ),
    "rows in pieces, PP 2": (
        2, "dense", {"enable_chunk_batch": True, "chunk_mbs": 3, "recompute": True, "pp_size": 2},
    ),
    "ignored tied pair, TP 2": (2, "dense", {"ignored_modules": ["lm_head"], "tp_size": 2}),
    "ignored output layer of a tied pair, PP 2 x FSDP 2": (
        4, "dense", {"ignored_modules": ["lm_head"], "pp_size": 2},
    ),
    "ignored embedding of a tied pair, PP 2 x FSDP 2": (
        4, "dense", {"ignored_modules": ["model.embed_tokens"], "pp_size": 2},
    ),
    "ignored body of a tied pair, PP 2 x FSDP 2": (4, "dense", {"ignored_modules": ["model"], "pp_size": 2}),
    "norms in units of their own, FSDP 2": (2, "dense", NORMS_ALONE),
    "norms in units of their own, PP 2 x FSDP 2": (4, "dense", NORMS_ALONE | {"pp_size": 2}),
    "ignored, EP 2": (2, "moe", IGNORED_BESIDE_EXPERTS | {"ep_size": 2}),
    "ignored, TP 2 with EP 2": (2, "moe", IGNORED_BESIDE_EXPERTS | {"tp_size": 2, "ep_size": 2}),
    "ignored experts, FSDP 2": (2, "moe", {"ignored_modules": ["model.layers.{*}.mlp.experts"]}),
    "ignored experts, TP 2": (2, "moe", {"ignored_modules": ["model.layers.{*}.mlp.experts"], "tp_size": 2}),
    "columns, FSDP 2": (2, "dense", BY_DIM_1),
    "columns, HSDP 2x2": (4, "dense", BY_DIM_1 | {"fsdp_size": 2}),
    "columns, FSDP 2 x TP 2": (4, "dense", BY_DIM_1 | {"tp_size": 2}),
    "columns, FSDP 2 x TP 2, experts": (4, "moe", BY_DIM_1 | {"tp_size": 2}),
    "columns of experts, EFSDP 2": (
        4, "moe",
        {"efsdp_shard_placement_fn": "shard_by_dim_1", "ep_size": 2, "fsdp_modules": ["model.layers.{*}"]},
    ),
    "far prefetch, kept, EP 2": (4, "moe", FAR | {"ep_size": 2, "reshard_after_forward": False}),
    "no prefetch, EP 2": (
        4, "moe",
        {"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0, "ep_size": 2, "recompute": True},
    ),
    "offload, HSDP 2x2": (4, "dense", OFFLOAD | {"fsdp_size": 2}),
    "offload, FSDP 2 x TP 2": (4, "dense", OFFLOAD | {"tp_size": 2}),
    "offload, EP 2 on FSDP 4": (4, "moe", OFFLOAD | {"ep_size": 2}),
}  # fmt: skip
QUICK = {"ignored, FSDP 2 x TP 2", "columns, FSDP 2", "norms in units of their own, FSDP 2",
         "mlps in units of their own, recomputed, FSDP 2"}  # fmt: skip


@pytest.fixture(scope="module")
def references(ranks, model_zoo):
    found: dict[str, Outcome] = {}

    def reference(family: str) -> Outcome:
        if family not in found:
            recipe = Recipe(training=TRAINING, steps=2)
            found[family] = ranks.run(
                1, train_rows, model_zoo.folder(f"parity_{family}"), make_rows(), recipe
            )[0]
        return found[family]

    return reference


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CASES]
)
def test_the_training_stays_the_same(ranks, model_zoo, references, name):
    world, family, parallel = CASES[name]
    recipe = Recipe(accumulation=2, training=TRAINING, parallel=parallel, steps=2)
    folder, reference = model_zoo.folder(f"parity_{family}"), references(family)
    ours = joined(ranks.run(world, train_stages, folder, make_rows(), recipe))
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-5)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= 1e-5
    assert largest_relative_difference(ours.weights, reference.weights) <= 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("parallel", [{}, {"fsdp_size": 2}, {"ignored_modules": ["model.norm"]}])
def test_sums_in_half_precision_are_sums(ranks, model_zoo, references, dtype, parallel):
    """A mean, or torch's split of the divisor for fp16, would be off by the number of ranks."""
    recipe = Recipe(training=TRAINING, parallel={"reduce_dtype": dtype} | parallel, steps=1)
    ours = ranks.run(4, train_rows, model_zoo.folder("parity_dense"), make_rows(), recipe)[0]
    assert largest_relative_difference(ours.first_grads, references("dense").first_grads) <= 2e-2


@pytest.mark.parametrize(
    ("world", "family", "parallel", "message"),
    [
        (3, "dense", BY_DIM_1, r"dimension 1 of \S+weight \[\d+, 32\] over 3 ranks"),
        pytest.param(
            2, "moe", {"ignored_modules": ["model.layers.{0-0}"], "ep_size": 2},
            r"model\.layers\.0 holds the experts model\.layers\.0\.mlp\.experts", marks=pytest.mark.soak,
        ),
        pytest.param(
            2, "moe", {"ep_fsdp_modules": ["model.layers.{0-1}.mlp.experts"], "ep_size": 2},
            r"ep_fsdp_modules: model\.layers\.2\.mlp\.experts is split", marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_split_so_is_refused_by_name(ranks, model_zoo, world, family, parallel, message):
    with pytest.raises(AssertionError, match=message):
        ranks.run(
            world, train_rows, model_zoo.folder(f"parity_{family}"), make_rows(), Recipe(parallel=parallel)
        )


@pytest.mark.soak
def test_columns_are_split_where_rows_would_not_reach_every_rank(ranks, tmp_path):
    """An MLP of two rows: each tp rank has one, and one of two fsdp ranks would have none."""
    folder = write_tiny_model(tmp_path, "parity_dense", intermediate_size=2)
    outcomes = [
        ranks.run(world, train_rows, folder, make_rows(), Recipe(1, parallel, TRAINING, steps=2))[0]
        for world, parallel in ((1, {}), (4, {"tp_size": 2}))
    ]
    reference, ours = outcomes
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= 1e-5
    assert largest_relative_difference(ours.weights, reference.weights) <= 1e-5


def dimensions_of_three_rows(shards_and_cuts, columns):
    """On one rank: where FSDP would split [3, columns] that tp has cut along each of ``cuts``; or why not."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardyard.errors import UserError

    found: list[Any] = []
    for shards, cut in shards_and_cuts:
        model = nn.Linear(columns, 3, bias=False)
        if cut is not None:
            split = distribute_tensor(torch.empty(3, columns), init_device_mesh("cpu", (1,)), [Shard(cut)])
            model.weight = nn.Parameter(split)
        try:
            place = dense_placement(model, ParallelConfig(), shards)(model.weight)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(place and place.dim)
    return found


def test_rows_that_tp_has_cut_reach_every_rank_or_columns_are_split(ranks):
    """None is FSDP's own choice, the rows; whole before, or cut by columns, a rank is read without a row."""
    cases = [(4, 0), (3, 0), (2, 0), (4, None), (4, 1)]
    assert ranks.run(1, dimensions_of_three_rows, cases, 8)[0] == [1, None, None, None, None]
    (told,) = ranks.run(1, dimensions_of_three_rows, [(4, 0)], 6)[0]
    assert told.startswith("parallel.fsdp_size: 4 ranks share the 3 rows of weight") and "6 columns" in told


class Unit(nn.Module):
    """Stands for an FSDP unit: remembers what it is told to gather ahead."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.forward_list: list[Unit] = []
        self.backward_list: list[Unit] = []
        for name, child in children.items():
            self.add_module(name, child)

    def set_modules_to_forward_prefetch(self, modules):
        self.forward_list = modules

    def set_modules_to_backward_prefetch(self, modules):
        self.backward_list = modules


def test_prefetch_follows_the_order_of_execution_experts_included():
    """Forwards embedding, layer 0, its experts, layer 1, ...; backwards a layer comes before its experts, and
    the embedding's group with the head, which it is tied to, first.
    """
    experts = [Unit(), Unit()]
    layers = [Unit(experts=e) for e in experts]
    embedding, head = Unit(), Unit()
    model = nn.Module()
    model.embedding, model.layers, model.head = embedding, nn.ModuleList(layers), head
    groups = [[head, embedding], *([unit] for pair in zip(layers, experts, strict=True) for unit in pair)]
    set_prefetch(model, groups, ParallelConfig(num_to_forward_prefetch=2, num_to_backward_prefetch=1))
    assert head.forward_list == [layers[0], experts[0]]
    assert layers[0].forward_list == [experts[0], layers[1]]
    assert layers[1].forward_list == [experts[1]] and experts[1].forward_list == []
    assert head.backward_list == [layers[1]] and layers[1].backward_list == [experts[1]]
    assert experts[1].backward_list == [layers[0]] and layers[0].backward_list == [experts[0]]
    assert experts[0].backward_list == []


def trained_and_exported(folder, out, parallel):
    """The gathered weights after a step, which are exported to ``out``."""
    from support.training import build_step, micro_batches_of, whole

    from shardyard.checkpoint import check_exportable, export_hf

    built, step, meshes = build_step(folder, Recipe(parallel=parallel))
    check_exportable(built.model, source_dir=folder, tokenizer=None)
    step(micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    out.mkdir(exist_ok=True)
    export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None, shard_bytes=5e9)
    return whole(dict(built.model.named_parameters()))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(4, IGNORED | {"fsdp_size": 2}), (4, IGNORED | {"tp_size": 2}), (2, BY_DIM_1)],
)
def test_what_is_exported_is_what_was_trained_once(ranks, model_zoo, tmp_path, world, parallel):
    from safetensors.numpy import load_file

    folder = model_zoo.folder("parity_dense")
    weights = ranks.run(world, trained_and_exported, folder, tmp_path / "out", parallel)[0]
    (file,) = (tmp_path / "out").glob("*.safetensors")
    exported = load_file(file)
    assert exported.keys() == load_file(next(folder.glob("*.safetensors"))).keys()
    assert largest_relative_difference(exported, {name: weights[name] for name in exported}) == 0.0
