"""What is read of a checkpoint of the reference, value by value, and what is refused and by which words."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import Bomb

from shardyard.errors import UserError

EXPERTS, WIDTH, DEPTH, VOCAB = 2, 3, 4, 6
NAMES = {"embed.weight": (VOCAB, DEPTH), "experts": (EXPERTS, WIDTH, DEPTH), "norm.weight": (DEPTH,)}


def tiny():
    """A model of three parameters, one of them tied, and an AdamW that has not begun."""
    import torch

    net, inner = torch.nn.Module(), torch.nn.Module()
    inner.embed, inner.norm = torch.nn.Embedding(VOCAB, DEPTH), torch.nn.LayerNorm(DEPTH, bias=False)
    inner.experts = torch.nn.Parameter(torch.zeros(EXPERTS, WIDTH, DEPTH))
    net.model, net.lm_head = inner, torch.nn.Linear(DEPTH, VOCAB, bias=False)
    net.lm_head.weight = inner.embed.weight
    return net, torch.optim.AdamW(net.parameters(), lr=1.0)


def value(name: str, kind: int) -> Any:
    """Another number in every place of every tensor."""
    import torch

    shape = NAMES[name]
    first = 1000 * kind + 100 * list(NAMES).index(name)
    return first + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def merged(tensor: Any) -> Any:
    """Row e * DEPTH + d is what all of expert e's outputs take from input d."""
    import torch

    return torch.stack([tensor[e, :, d] for e in range(EXPERTS) for d in range(DEPTH)])


def tensors(before: str = "optimizer.state.model.") -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for name in NAMES:
        kinds = [value(name, kind) for kind in range(3)]
        if name == "experts":
            kinds = [merged(tensor) for tensor in kinds]
        found[f"model.model.model.{name}"] = kinds[0]
        for what, tensor in zip(("exp_avg", "exp_avg_sq"), kinds[1:], strict=True):
            found[f"{before}model.{name}.{what}"] = tensor
        found[f"{before}model.{name}.step"] = torch.tensor(float(7))
    found["model.model.lm_head.weight"] = found["model.model.model.embed.weight"].clone()
    return found


def write(folder: Path, content: dict[str, Any], extra: object = None) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save(content, checkpoint_id=folder, no_dist=True)
    if extra is not None:
        (folder / "extra_state").mkdir()
        torch.save(extra, folder / "extra_state/extra_state_rank_0.pt")
    return folder


def read(folder: Path) -> tuple[Any, Any, Any]:
    """(what was read besides, model, optimizer)."""
    from shardyard.checkpoint.agreement import Peers
    from shardyard.checkpoint.reference import check_reference, is_reference, read_reference

    assert is_reference(folder)
    check_reference(folder)
    net, optimizer = tiny()
    return read_reference(folder, Peers(), model=net, optimizer=optimizer), net, optimizer


def all_values_are_right(net: Any, optimizer: Any, step: int) -> None:
    import torch

    for name, parameter in net.model.named_parameters():
        assert torch.equal(parameter, value(name, 0)), name
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], value(name, 1)), name
        assert torch.equal(state["exp_avg_sq"], value(name, 2)), name
        assert state["step"].item() == step, name


def every_form(root: Path) -> None:
    import torch

    forms = (
        "",
        "state.",
        "state.model.",
        "model.",
        "model.model.",
        "ep.state.",
        "state.non_ep.model.",
        "ep.",
    )
    for number, form in enumerate(forms):
        content = tensors(f"optimizer.{form}")
        found, net, optimizer = read(write(root / str(number) / "global_step_9", content, {"global_step": 9}))
        assert (found.step, found.has_optimizer) == (9, True), form
        all_values_are_right(net, optimizer, step=7)
    # The tied parameter under its other name; steps that are plain numbers; a parameter of its own optimizer.
    content = tensors()
    for what in ("exp_avg", "exp_avg_sq"):
        key = f"optimizer.state.model.model.embed.weight.{what}"
        content[key.replace("model.embed", "lm_head")] = content.pop(key)
    content |= {key: 7.0 for key in content if key.endswith(".step")}
    content["optimizer.param_groups"] = Bomb(root / "ran")
    content["optimizer.state.model.model.unknown.weight.exp_avg"] = torch.ones(2)
    found, net, optimizer = read(write(root / "global_step_11", content, {"global_step": 12}))
    assert found.step == 12
    all_values_are_right(net, optimizer, step=12)
    assert not (root / "ran").exists()


def test_weights_and_moments_are_found_under_every_form_of_their_names(ranks, tmp_path):
    ranks.run(1, every_form, tmp_path, init_process_group=False)


def steps_without_plain_data(root: Path) -> dict[str, Any]:
    """Extra state of each kind -> the step, or what is said; and the warnings."""
    import logging

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[name] = (said.get(name), record.getMessage())

    said: dict[str, Any] = {}
    handler = Warnings(logging.WARNING)
    logging.getLogger("shardyard").addHandler(handler)
    kinds: dict[str, Any] = {
        "hostile": {"global_step": 3, "x": Bomb(root / "extra_ran")}, "absent": None,
        "text": {"global_step": "3"}, "true": {"global_step": True},
        "below": {"global_step": -1}, "huge": {"global_step": 2**60},
        "list": [3], "else": {"step": 3},
    }  # fmt: skip
    for name, extra in kinds.items():
        found, _, optimizer = read(write(root / name / "global_step_21", tensors(), extra))
        assert {state["step"].item() for state in optimizer.state.values()} == {7}
        said[name] = (found.step, said[name][1])
    shutil.copytree(root / "absent/global_step_21", root / "renamed")
    try:
        read(root / "renamed")
    except UserError as error:
        said["renamed"] = (None, str(error))
    logging.getLogger("shardyard").removeHandler(handler)
    return said


def test_extra_state_is_read_as_data_only_and_else_the_name_tells_the_step(ranks, tmp_path):
    said = ranks.run(1, steps_without_plain_data, tmp_path, init_process_group=False)[0]
    assert not (tmp_path / "extra_ran").exists()
    assert {step for name, (step, _) in said.items() if name != "renamed"} == {21}
    reasons = {
        "hostile": "mkdir, which is not plain data", "absent": "does not exist", "text": "global_step is '3'",
        "true": "global_step is True", "below": "global_step is -1", "huge": f"global_step is {2**60}",
        "list": "holds no global_step", "else": "holds no global_step", "renamed": "global_step_<N>",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert reason in said[name][1], (name, said[name])


def refusals(root: Path) -> dict[str, str]:
    import torch

    changed: dict[str, dict[str, Any]] = {}

    def change(name: str, **others: Any) -> None:
        content = tensors()
        for key, tensor in others.items():
            key = next(k for k in content if k.startswith("optimizer") and k.endswith(key.replace("__", ".")))
            content.pop(key)
            content |= {} if tensor is None else {key: tensor}
        changed[name] = content

    change("missing", norm__weight__exp_avg_sq=None, experts__exp_avg=None)
    change("shape", norm__weight__exp_avg=torch.ones(7))
    changed["twice"] = tensors() | {"optimizer.other.model.norm.weight.exp_avg": torch.ones(DEPTH)}
    changed["ours"] = {key.removeprefix("model."): t for key, t in tensors("optimizer.").items()}
    changed["other"] = {key: t for key, t in tensors().items() if key != "model.model.model.norm.weight"}
    for name in ("cut", "part"):
        changed[name] = tensors()
    said = {}
    for name, content in changed.items():
        write(root / name, content, {"global_step": 9})
    (file,) = (root / "cut").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    metadata = pickle.loads((root / "part/.metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.model.model.embed.weight"]
    entry.chunks = [type(entry.chunks[0])(torch.Size((0, 0)), torch.Size((3, DEPTH)))]
    (root / "part/.metadata").write_bytes(pickle.dumps(metadata))
    (root / "hostile").mkdir()
    (root / "hostile/.metadata").write_bytes(pickle.dumps(Bomb(root / "metadata_ran")))
    for name in (*changed, "hostile"):
        try:
            read(root / name)
        except UserError as error:
            said[name] = str(error)
    return said


def test_what_does_not_fit_is_damaged_or_hostile_is_named(ranks, tmp_path):
    said = ranks.run(1, refusals, tmp_path, init_process_group=False)[0]
    wanted = {
        "missing": ("2 of the 3 trained parameters: model.experts, model.norm.weight", "model_name_or_path"),
        "shape": ("model.norm.weight: exp_avg [7] there, [4] here",),
        "twice": ("exp_avg of model.norm.weight twice", "optimizer.other.model.norm.weight.exp_avg"),
        "ours": ("no manifest.json", "none of the reference"),
        "other": ("1 missing (such as model.norm.weight)",),
        "cut": (".distcp has ", " bytes"),
        "part": ("12 values of model.model.model.embed.weight, not all of them",),
        "hostile": ("no checkpoint needs",),
    }
    for name, words in wanted.items():
        assert said[name].startswith("training.resume_from_checkpoint: "), said[name]
        assert all(word in said[name] for word in (*words, str(tmp_path / name))), said[name]
    assert not (tmp_path / "metadata_ran").exists()


def read_into_adam_mini(root: Path) -> tuple[str, bool]:
    """With norms that have no state, as frozen ones: what is said, and whether the weights stand."""
    from shardyard.checkpoint.agreement import Peers
    from shardyard.checkpoint.reference import read_reference
    from shardyard.optim.adam_mini import AdamMini, Blocks

    net, _ = tiny()
    matrices = {p: Blocks(p.ndim - 1) for p in net.parameters() if p.ndim > 1}
    optimizer = AdamMini([{"params": list(matrices)}], matrices)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(UserError) as caught:
        read_reference(
            write(root / "it", tensors(), {"global_step": 9}), Peers(), model=net, optimizer=optimizer
        )
    same = all(bool((p == was).all()) for p, was in zip(net.parameters(), before, strict=True))
    return str(caught.value), same


def test_moments_of_adamw_are_not_cut_to_those_of_adam_mini(ranks, tmp_path):
    said, same = ranks.run(1, read_into_adam_mini, tmp_path, init_process_group=False)[0]
    assert "whose state differs (exp_avg_sq); set training.optimizer: adamw" in said
    assert same


def weights_alone(root: Path) -> list[str]:
    import torch

    from shardyard.checkpoint import CheckpointStore
    from shardyard.data.order import EpochOrder
    from shardyard.data.sampler import ElasticSampler
    from shardyard.train.differences import RunFacts
    from shardyard.train.resume import restore

    content = {key: t for key, t in tensors().items() if key.startswith("model.")}
    folder = write(root / "ref/checkpoints/global_step_3", content)
    net, optimizer = tiny()
    order = EpochOrder(8, seed=1, shuffle=True)
    sampler = ElasticSampler(order, global_batch=4, drop_last=False, num_train_epochs=1, max_steps=-1)
    said = []
    for out in ("new", "ref"):
        store = CheckpointStore(root / out, save_total_limit=None)
        built: Any = SimpleNamespace(model=net)
        try:
            state, before = restore(store, str(folder), built, optimizer, "o", RunFacts({}), sampler=sampler)
            assert (state.step, state.cursor, before) == (0, 0, None) and not optimizer.state
            assert torch.equal(built.model.model.experts, value("experts", 0))
        except UserError as error:
            said.append(str(error))
    return said


def test_a_checkpoint_of_weights_alone_begins_at_step_0_in_another_folder(ranks, tmp_path):
    (said,) = ranks.run(1, weights_alone, tmp_path, init_process_group=False)[0]
    assert "weights only" in said and "name another training.output_dir" in said


@pytest.mark.parametrize("beside", ["manifest.json", "run_state.json", "metadata.json"])
def test_a_folder_of_ours_or_of_megatron_is_none_of_the_reference(tmp_path, beside):
    from shardyard.checkpoint.reference import is_reference, newest_reference

    for step in (5, 10):
        folder = tmp_path / f"checkpoints/global_step_{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    assert is_reference(folder) and newest_reference(tmp_path) == folder
    assert newest_reference(folder.parent) == folder and newest_reference(folder) is None
    (folder / beside).touch()
    assert not is_reference(folder) and newest_reference(tmp_path) == tmp_path / "checkpoints/global_step_5"


@pytest.mark.parametrize(
    ("places", "warns"),
    [
        ([(0, 0), (0, 3), (4, 0), (4, 3)], True),
        ([(0, 0), (4, 0)], False),
        ([(0, 0), (0, 3)], False),
    ],
)
def test_experts_that_were_split_both_ways_are_doubted(tmp_path, caplog, places, warns):
    """REFERENCE 9.3, item 27: such pieces may stand in the order of other ranks."""
    from shardyard.checkpoint.weights_only import Saved, warn_of_grids

    entry = SimpleNamespace(chunks=[SimpleNamespace(offsets=place) for place in places])
    metadata: Any = SimpleNamespace(state_dict_metadata={"experts": entry, "matrix": entry})
    with caplog.at_level("WARNING", "shardyard"):
        warn_of_grids(tmp_path, metadata, {"a": Saved("matrix")})
        assert not caplog.records
        warn_of_grids(tmp_path, metadata, {"a": Saved("matrix"), "b": Saved("experts", merged=True)})
    assert len(caplog.records) == warns
    assert all("ep_fsdp_size" in record.getMessage() for record in caplog.records)
