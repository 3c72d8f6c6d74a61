"""However ranks share experts, their weights are the file's, or the seed's; and what FSDP splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import tiny_config, write_tiny_model
from support.ranks import RankPool
from support.training import whole

from shardyard.errors import UserError
from shardyard.parallel.experts.placement import expert_placement, least_waste

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
PLACEMENTS = ("auto", "shard_by_dim_0", "shard_by_dim_1")
Cases = dict[str, list[dict[str, Any]]]
"""The layouts in which each model is built."""
EXPERTS = {"gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each family one with 4 experts; of one another with 6, which 4 ranks share unevenly."""
    root = tmp_path_factory.mktemp("experts")
    folders = {family: write_tiny_model(root / family, family) for family in FAMILIES}
    for family, key in EXPERTS.items():
        name = f"{family} of 6"
        folders[name] = write_tiny_model(root / name, family, **{key: 6})
    return folders


def build(folder: Path, parallel: dict[str, Any], *, from_seed: bool) -> Any:
    import torch.distributed as dist

    from shardyard.config import ModelConfig, ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device
    from shardyard.models import Placement, build_model, load_model_config
    from shardyard.parallel import build_meshes

    options = ModelConfig(model_name_or_path=str(folder), train_from_scratch=from_seed)
    settings = ParallelConfig(**parallel)
    meshes = build_meshes(resolve_layout(settings, dist.get_world_size()), "cpu")
    config = load_model_config(options, folder)
    return build_model(options, config, folder, Placement(settings, meshes, Device("cpu")), seed=7).model


def load_in_layouts(
    folders: dict[str, Path], cases: Cases, from_seed: bool
) -> dict[str, list[dict[str, np.ndarray]]]:
    """The whole weights of models built on all ranks."""
    return {
        name: [
            whole(dict(build(folders[name], layout, from_seed=from_seed).named_parameters()))
            for layout in layouts
        ]
        for name, layouts in cases.items()
    }


def ep_2(place: str) -> dict[str, Any]:
    return {"ep_size": 2, "efsdp_shard_placement_fn": place}


def layouts_of(world: int, name: str) -> list[dict[str, Any]]:
    """All that is possible: alone on its ranks an expert is not split; 6 over 4 would leave a rank empty."""
    sizes = [ep for ep in (1, 2, 4) if ep <= world and not (ep == 4 and name.endswith("of 6"))]
    return [
        {"ep_size": ep, "efsdp_shard_placement_fn": place}
        for ep in sizes
        for place in PLACEMENTS
        if (ep < world or place == "auto")
        and not (name == "qwen3_moe of 6" and world // ep == 4 and place == "shard_by_dim_0")
    ]


def assert_equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], label: str) -> None:
    assert got.keys() == wanted.keys(), label
    for name, weight in wanted.items():
        np.testing.assert_array_equal(got[name], weight, err_msg=f"{label}: {name}")


def from_transformers(folder: Path) -> dict[str, np.ndarray]:
    """transformers' own loading, in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def check_loaded(ranks: RankPool, folders: dict[str, Path], world: int, cases: Cases) -> None:
    loaded = ranks.run(world, load_in_layouts, folders, cases, False)[0]
    for name, layouts in cases.items():
        wanted = from_transformers(folders[name])
        for layout, got in zip(layouts, loaded[name], strict=True):
            assert_equal(got, wanted, f"{name} {layout}")


def test_loaded_weights_are_those_of_the_file(ranks: RankPool, models: dict[str, Path]) -> None:
    """EP 2 x EFSDP 2, both with experts that divide and with 3 on 2 ranks."""
    cases = {
        "qwen3_moe": [ep_2("auto"), ep_2("shard_by_dim_1")],
        "qwen3_moe of 6": [ep_2("auto"), ep_2("shard_by_dim_0")],
        "gpt_oss": [ep_2("shard_by_dim_1")],
    }
    check_loaded(ranks, models, 4, cases)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_loaded_weights_are_those_of_the_file_in_all_layouts(
    ranks: RankPool, models: dict[str, Path], world: int
) -> None:
    check_loaded(ranks, models, world, {name: layouts_of(world, name) for name in models})


def check_seeded(ranks: RankPool, folders: dict[str, Path], world: int, cases: Cases) -> None:
    wanted = ranks.run(1, load_in_layouts, folders, {name: [{}] for name in cases}, True)[0]
    drawn = ranks.run(world, load_in_layouts, folders, cases, True)[0]
    for name, layouts in cases.items():
        for layout, got in zip(layouts, drawn[name], strict=True):
            assert_equal(got, wanted[name][0], f"{name} {layout}")
        first = wanted[name][0]["model.layers.1.mlp.experts.gate_up_proj"]
        assert len({expert.tobytes() for expert in first}) == len(first), "experts start alike"


def test_seeded_weights_are_the_same_when_experts_are_split(ranks: RankPool, models: dict[str, Path]) -> None:
    check_seeded(ranks, models, 4, {"qwen3_moe of 6": [ep_2("auto"), ep_2("shard_by_dim_0")]})


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_seeded_weights_are_the_same_in_all_layouts(
    ranks: RankPool, models: dict[str, Path], world: int
) -> None:
    check_seeded(ranks, models, world, {name: layouts_of(world, name) for name in models})


def export_in_layouts(folders: dict[str, Path], cases: Cases, out: Path) -> None:
    from shardyard.checkpoint import export_hf

    for name, layouts in cases.items():
        for number, layout in enumerate(layouts):
            model = build(folders[name], layout, from_seed=False)
            target = out / f"{name}-{number}"
            export_hf(model, out_dir=target, source_dir=folders[name], tokenizer=None)


def check_exported(ranks: RankPool, folders: dict[str, Path], world: int, cases: Cases, out: Path) -> None:
    from safetensors.numpy import load_file

    ranks.run(world, export_in_layouts, folders, cases, out)
    for name, layouts in cases.items():
        wanted = load_file(folders[name] / "model.safetensors")
        for number, layout in enumerate(layouts):
            files = sorted((out / f"{name}-{number}").glob("*.safetensors"))
            got = {key: value for file in files for key, value in load_file(file).items()}
            assert_equal(got, wanted, f"{name} {layout}")


def test_exported_files_are_the_source(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    check_exported(ranks, models, 4, {"qwen3_moe of 6": [ep_2("auto"), ep_2("shard_by_dim_0")]}, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_exported_files_are_the_source_in_all_layouts(
    ranks: RankPool, models: dict[str, Path], world: int, tmp_path: Path
) -> None:
    check_exported(ranks, models, world, {name: layouts_of(world, name) for name in models}, tmp_path)


@pytest.mark.parametrize(
    ("shape", "shards", "joined", "dim"),
    [
        ((16, 24, 32), 8, 1, 0),  # experts divide
        ((2, 24, 32), 16, 1, 2),  # 235B on ep 64: 2 experts over 16 ranks, dim 1 joins gate and up
        ((2, 24, 32), 8, None, 1),
        ((3, 24), 8, None, 1),
        ((3, 25, 31), 2, None, 0),  # nothing divides: padded
    ],
)
def test_the_dimension_that_wastes_least(
    shape: tuple[int, ...], shards: int, joined: int | None, dim: int
) -> None:
    assert least_waste(shape, shards, joined) == dim


@pytest.mark.parametrize(
    ("experts", "shards", "wish", "told"),
    [
        (6, 4, "shard_by_dim_0", ["6 experts", "4 ranks"]),  # 2, 2, 2 and none
        (4, 5, "shard_by_dim_0", ["4 experts", "5 ranks"]),
        (4, 5, "auto", ["4 experts", "5 ranks"]),
        (4, 3, "shard_by_dim_1", ["dimension 2", "32", "3 ranks"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_both_numbers(
    experts: int, shards: int, wish: Any, told: list[str]
) -> None:
    module = qwen3_experts(experts)
    place = expert_placement([module], shards, wish)
    with pytest.raises(UserError) as raised:
        place(module.gate_up_proj)
    assert all(piece in str(raised.value) for piece in ["parallel.efsdp_shard_placement_fn", *told])


def place_gpt_oss_experts(shards: int, cut_before: bool) -> int | str:
    """On one rank: where ``shards`` ranks split 4 experts as the file has them; or why they cannot."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    module = GptOssExperts(tiny_config("gpt_oss"))
    if cut_before:  # as expert parallelism does it
        split = distribute_tensor(module.gate_up_proj.data, init_device_mesh("cpu", (1,)), [Shard(0)])
        module.gate_up_proj = torch.nn.Parameter(split)
    try:
        place = expert_placement([module], shards, "auto")(module.gate_up_proj)
    except UserError as error:
        return str(error)
    assert place is not None
    return place.dim


def test_ranks_may_hold_no_expert_only_of_what_is_stored_as_held_and_cut_once(ranks: RankPool) -> None:
    assert ranks.run(1, place_gpt_oss_experts, 5, False) == [0]
    assert ranks.run(1, place_gpt_oss_experts, 8, True) == [1]
    (told,) = ranks.run(1, place_gpt_oss_experts, 5, True)
    assert "4 experts" in told and "5 ranks" in told and "parallel.ep_size" in told


def test_wishes_are_met_and_joined_tensors_spared() -> None:
    module = qwen3_experts(4)
    other = module.gate_up_proj.new_zeros(3).requires_grad_()
    for wish, gate_up, down in (
        ("shard_by_dim_0", 0, 0), ("shard_by_dim_1", 2, 1), ("auto", 0, 0),
    ):  # fmt: skip
        place = expert_placement([module], 2, wish)
        assert (place(module.gate_up_proj).dim, place(module.down_proj).dim) == (gate_up, down)
        assert place(other) is None


def qwen3_experts(count: int) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = tiny_config("qwen3_moe")
    config.num_experts = count
    return Qwen3MoeExperts(config)


def test_every_tensor_that_reading_joins_is_known() -> None:
    """transformers' own list: what stacks experts and then joins tensors makes gate_up on dim 1."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    joined = [
        (family, rule.target_patterns, operation.dim)
        for family, rules in conversion_mapping._build_checkpoint_conversion_mapping().items()
        for rule in rules
        if isinstance(rule, WeightConverter)
        and any(isinstance(operation, MergeModulelist) for operation in rule.operations)
        for operation in rule.operations
        if isinstance(operation, Concatenate)
    ]
    assert len(joined) > 10
    for family, targets, dim in joined:
        assert dim == 1 and all(t.split(".")[-1].startswith("gate_up") for t in targets), family
