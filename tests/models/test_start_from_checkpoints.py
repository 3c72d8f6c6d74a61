"""A run that starts from the weights of a checkpoint begins as one that starts from the exported model."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, train_rows

from shardyard.errors import UserError

ROWS = make_rows(8)


def save_both(folder: Path, out: Path) -> None:
    """One step on these ranks, then a checkpoint in ``out/checkpoints`` and an export in ``out/hf``."""
    from shardyard.checkpoint import CheckpointStore, export_hf

    built, step, meshes = build_step(folder, Recipe())
    step(micro_batches_of(ROWS, 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    store = CheckpointStore(out, save_total_limit=None)
    store.save(1, model=built.model, optimizer=step.optimizer, run_state={})
    export_hf(built.model, out_dir=out / "hf", source_dir=folder, tokenizer=None)


def start_both(folder: Path, weights: Path, config: Path, recipe: Recipe):
    """Losses and weights of two runs, from the model in ``folder`` and from the checkpoint ``weights``."""
    import functools

    from shardyard import models
    from shardyard.checkpoint.weights_only import read_weights

    first = train_rows(folder, ROWS, recipe)
    options = _options(weights, config)
    source = models.resolve_source(options, fetch_first=lambda fetch: fetch())
    models.build_model = functools.partial(models.build_model, read_weights=read_weights)
    return first, train_rows(source, ROWS, recipe)  # type: ignore[arg-type]


def _options(weights: Path, config: Path):
    from shardyard.config import ModelConfig

    return ModelConfig(model_name_or_path=str(weights), config_name_or_path=str(config))


LAYOUTS = [
    ("parity_dense", 2, {"tp_size": 2}),
    ("parity_dense", 2, {"pp_size": 2}),
    ("parity_moe", 2, {"ep_size": 2}),
    pytest.param("parity_dense", 1, {}, marks=pytest.mark.soak),
    pytest.param("parity_moe", 2, {}, marks=pytest.mark.soak),
    pytest.param("parity_moe", 2, {"tp_size": 2}, marks=pytest.mark.soak),
    pytest.param("parity_moe", 2, {"pp_size": 2}, marks=pytest.mark.soak),
    pytest.param("parity_moe", 4, {"pp_size": 2, "ep_size": 2}, marks=pytest.mark.soak),
    pytest.param("parity_dense", 4, {"tp_size": 2, "fsdp_size": 2}, marks=pytest.mark.soak),
    pytest.param("parity_dense", 3, {}, marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """family -> folder with checkpoints/ and hf/, written by two ranks once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            ranks.run(2, save_both, write_tiny_model(root / "source", family), root)
            made[family] = root
        return made[family]

    return folder


@pytest.mark.parametrize(("family", "world", "parallel"), LAYOUTS)
def test_a_checkpoint_starts_a_run_as_its_export_does(ranks, saved, family, world, parallel):
    out = saved(family)
    recipe = Recipe(parallel=parallel, steps=2)
    checkpoint = out / "checkpoints/global_step_1"
    exported, begun = ranks.run(world, start_both, out / "hf", checkpoint, out / "hf", recipe)[0]
    assert begun.losses == exported.losses
    assert begun.weights.keys() == exported.weights.keys()
    assert all((begun.weights[name] == weight).all() for name, weight in exported.weights.items())


def write_reference(folder: Path, checkpoint: Path, *, merged: bool, change: str = "") -> None:
    """The model in ``folder`` as the reference saves it (REFERENCE 2.2, 2.6): two prefixes, tied weights
    twice, experts [E, 2I, H] as [E * H, 2I] where ``merged``; beside optimizer state and a hostile pickle.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    tensors: dict = {}
    for name, tensor in state.items():
        if merged and tensor.ndim == 3:
            experts, width, depth = tensor.shape
            tensor = torch.stack(
                [tensor[e, :, d] for e in range(experts) for d in range(depth)]
            )  # row e * depth + d
            assert tensor.shape == (experts * depth, width)
        tensors[f"model.model.{name}"] = tensor.contiguous()
    if change == "missing":
        del tensors["model.model.model.norm.weight"]
    if change == "misshaped":
        tensors["model.model.model.norm.weight"] = torch.ones(7)
    if change == "foreign":
        tensors["model.model.model.bogus.weight"] = torch.ones(7)
    if change == "nan":
        tensors["model.model.model.norm.weight"][3] = torch.nan
    tensors["optimizer.state.model.norm.weight.exp_avg"] = torch.ones(4)
    tensors["optimizer.param_groups"] = _Hostile(str(checkpoint.with_suffix(".marker")))
    dcp.save(tensors, checkpoint_id=checkpoint, no_dist=True)


class _Hostile:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path(self.marker).touch, ())


@pytest.mark.parametrize(
    ("family", "merged", "world", "parallel"),
    [
        ("parity_moe", True, 2, {"ep_size": 2}),
        pytest.param("parity_dense", False, 2, {"pp_size": 2}, marks=pytest.mark.soak),
        pytest.param("parity_moe", True, 2, {}, marks=pytest.mark.soak),
        pytest.param("parity_moe", True, 4, {}, marks=pytest.mark.soak),
        pytest.param("parity_moe", True, 2, {"shard_placement_fn": "shard_by_dim_1"}, marks=pytest.mark.soak),
        pytest.param("parity_moe", False, 2, {"tp_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_the_reference_s_checkpoint_starts_a_run(ranks, tmp_path, family, merged, world, parallel):
    folder, checkpoint = write_tiny_model(tmp_path / "hf", family), tmp_path / "global_step_5"
    write_reference(folder, checkpoint, merged=merged)
    recipe = Recipe(parallel=parallel, steps=0)
    wanted, found = ranks.run(world, start_both, folder, checkpoint, folder, recipe)[0]
    assert found.weights.keys() == wanted.weights.keys()
    assert all((found.weights[name] == weight).all() for name, weight in wanted.weights.items())
    assert not checkpoint.with_suffix(".marker").exists()


def refusals(cases):
    """What a start from each (weights, config) is refused with."""
    from shardyard import models
    from shardyard.checkpoint.weights_only import read_weights
    from shardyard.config import ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device
    from shardyard.parallel import build_meshes

    parallel = ParallelConfig()
    placement = models.Placement(parallel, build_meshes(resolve_layout(parallel, 1), "cpu"), Device("cpu"))
    said = []
    for weights, config in cases:
        options = _options(weights, config)
        try:
            source = models.resolve_source(options, fetch_first=lambda fetch: fetch())
            loaded = models.load_model_config(options, source)
            models.build_model(options, loaded, source, placement, seed=1, read_weights=read_weights)
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_or_is_hostile_is_named(ranks, tmp_path, saved):
    folder = write_tiny_model(tmp_path / "hf", "qwen3")
    cases = []
    for change in ("missing", "misshaped", "foreign", "nan"):
        write_reference(folder, tmp_path / change, merged=False, change=change)
        cases.append((tmp_path / change, folder))
    hostile, damaged = tmp_path / "hostile", tmp_path / "damaged"
    hostile.mkdir()
    (hostile / ".metadata").write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran"))))
    write_reference(folder, damaged, merged=False)
    file = next(damaged.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-5000])
    ours = saved("parity_dense") / "checkpoints/global_step_1"
    flipped = tmp_path / "global_step_1"
    flipped.mkdir()
    for path in (p for p in ours.rglob("*") if p.is_file()):
        (flipped / path.relative_to(ours)).parent.mkdir(exist_ok=True)
        (flipped / path.relative_to(ours)).write_bytes(path.read_bytes())
    first = min(flipped.glob("*.distcp"))
    first.write_bytes(bytes(b ^ (i == 3000) for i, b in enumerate(first.read_bytes())))
    cases += [(hostile, folder), (damaged, folder), (flipped, saved("parity_dense") / "hf")]
    said = dict(zip([c[0].name for c in cases], ranks.run(1, refusals, cases)[0], strict=True))
    assert "1 missing (such as model.norm.weight)" in said["missing"]
    assert "of another shape (such as model.norm.weight: [7] there, [32] in the model)" in said["misshaped"]
    assert "1 unknown to it (such as model.model.model.bogus.weight)" in said["foreign"]
    assert "model.norm.weight" in said["nan"] and "NaN" in said["nan"]
    assert "no checkpoint needs" in said["hostile"] and not (tmp_path / "ran").exists()
    assert str(damaged) in said["damaged"]
    assert first.name in said["global_step_1"]
    assert all("model.model_name_or_path" in message for message in said.values()), said


def unfilled(folder: Path) -> str:
    """What is said when a reader leaves one weight as it was."""
    import functools

    from shardyard import models

    def forgets(model, folder):
        from shardyard.parallel import local

        for name, parameter in model.named_parameters():
            if name != "model.layers.1.mlp.up_proj.weight":
                local(parameter).data.fill_(0.5)

    models.build_model = functools.partial(models.build_model, read_weights=forgets)
    try:
        build_step(models.ModelSource(folder, folder, "checkpoint"), Recipe())  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


def test_a_weight_that_was_not_read_is_seen(ranks, tmp_path):
    message = ranks.run(1, unfilled, write_tiny_model(tmp_path / "m", "qwen3"))[0]
    assert "model.layers.1.mlp.up_proj.weight" in message and "NaN" in message


def test_assets_beside_a_checkpoint_are_its_config_and_tokenizer(tmp_path):
    from shardyard.config import ModelConfig
    from shardyard.models import resolve_source, tokenizer_options

    checkpoint = tmp_path / "global_step_3"
    (checkpoint / "assets").mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    (checkpoint / "assets/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    options = ModelConfig(model_name_or_path=str(checkpoint))
    source = resolve_source(options, fetch_first=lambda fetch: fetch())
    assert (source.config, source.weights, source.form) == (checkpoint / "assets", checkpoint, "checkpoint")
    assert tokenizer_options(options, source).tokenizer_name_or_path == str(checkpoint / "assets")
    named = options.model_copy(update={"tokenizer_name_or_path": "org/name"})
    assert tokenizer_options(named, source).tokenizer_name_or_path == "org/name"
