"""Checkpoints: what comes back on any number of ranks, what a killed save leaves, what a hostile file can
do.
"""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import Bomb, reseal
from support.models import write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, whole

from shardyard.checkpoint import CheckpointStore, fault_of, prepare_output_dir
from shardyard.errors import UserError

RECIPE = Recipe(training={"adam_epsilon": 1e-4})


def batches(meshes):
    return micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)


def train_and_save(folder, out, steps=2, with_optimizer=True, parallel=None):
    built, step, meshes = build_step(folder, Recipe(training=RECIPE.training, parallel=parallel or {}))
    for k in range(1, steps + 1):
        step(batches(meshes), step=k, lr=1e-2)
    store = CheckpointStore(out, save_total_limit=None)
    store.save(
        steps,
        model=built.model,
        optimizer=step.optimizer if with_optimizer else None,
        run_state={"step": steps},
    )
    following = [step(batches(meshes), step=k, lr=1e-2).loss for k in (steps + 1, steps + 2)]
    return following, whole(dict(built.model.named_parameters()))


def load_and_go_on(folder, out, steps=2, parallel=None):
    built, step, meshes = build_step(folder, Recipe(training=RECIPE.training, parallel=parallel or {}))
    store = CheckpointStore(out, save_total_limit=None)
    restored = store.load(store.latest(), model=built.model, optimizer=step.optimizer)
    following = [step(batches(meshes), step=k, lr=1e-2).loss for k in (steps + 1, steps + 2)]
    return following, whole(dict(built.model.named_parameters())), restored


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_a_resumed_run_is_bit_equal_on_the_same_layout_and_close_on_others(ranks, tmp_path, family):
    folder = write_tiny_model(tmp_path / "m", family)
    wanted, weights = ranks.run(2, train_and_save, folder, tmp_path / "run")[0]
    losses, same, restored = ranks.run(2, load_and_go_on, folder, tmp_path / "run")[0]
    assert restored.run_state == {"step": 2} and restored.has_optimizer
    assert losses == wanted and all(np.array_equal(same[n], weights[n]) for n in weights)
    for world, parallel in ((1, {}), (4, {}), (4, {"fsdp_size": 2}), (2, {"cpu_offload": True})):
        losses, _, _ = ranks.run(world, load_and_go_on, folder, tmp_path / "run", 2, parallel)[0]
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_weights_alone_come_back_without_optimizer_state(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(2, train_and_save, folder, tmp_path / "run", 2, False)
    _, _, restored = ranks.run(2, load_and_go_on, folder, tmp_path / "run")[0]
    assert not restored.has_optimizer


def fake_checkpoint(out: Path, step: int) -> Path:
    path = out / "checkpoints" / f"global_step_{step}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    return path


def save_with_limit(folder, out, limit, steps):
    built, step, _ = build_step(folder, RECIPE)
    store = CheckpointStore(out, save_total_limit=limit)
    for number in steps:
        store.save(number, model=built.model, optimizer=step.optimizer, run_state={"step": number})
    return sorted(path.name for path in store.folder.iterdir())


def test_retention_counts_complete_checkpoints_by_number(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    fake_checkpoint(tmp_path, 9)
    (tmp_path / "checkpoints" / "global_step_7").mkdir()  # cut short: no manifest
    left = ranks.run(2, save_with_limit, folder, tmp_path, 2, [10, 100])[0]
    assert left == ["global_step_10", "global_step_100", "global_step_7", "latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step_100\n"
    assert CheckpointStore(tmp_path, save_total_limit=None).latest().name == "global_step_100"


def test_saving_the_same_step_again_replaces_it(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    left = ranks.run(1, save_with_limit, folder, tmp_path, None, [4, 4])[0]
    assert left == ["global_step_4", "latest"]
    assert fault_of(tmp_path / "checkpoints" / "global_step_4") is None


def test_truncated_files_are_never_latest_and_are_named(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1, 2])
    victim = next((tmp_path / "checkpoints" / "global_step_2").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    store = CheckpointStore(tmp_path, save_total_limit=None)
    assert store.latest().name == "global_step_1"
    with pytest.raises(UserError, match=victim.name):
        store.resolve(str(victim.parent))
    with pytest.raises(UserError, match="does not exist"):
        store.resolve(str(tmp_path / "nothing"))


def message_of_load(folder, path):
    built, step, _ = build_step(folder, RECIPE)
    try:
        CheckpointStore(path.parents[1], save_total_limit=None).load(
            path, model=built.model, optimizer=step.optimizer
        )
    except UserError as error:
        return str(error)
    return None


def test_a_flipped_bit_is_found_by_every_rank(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1])
    victim = next((tmp_path / "checkpoints" / "global_step_1").glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    for message in ranks.run(2, message_of_load, folder, victim.parent):
        assert message is not None and victim.name in message


def test_a_checkpoint_of_another_model_is_refused_by_tensor(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1])
    other = write_tiny_model(tmp_path / "other", "qwen3_moe")
    message = ranks.run(2, message_of_load, other, tmp_path / "checkpoints" / "global_step_1")[1]
    assert "another model" in message and "mlp" in message


def test_a_hostile_metadata_file_runs_nothing(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1])
    path, marker = tmp_path / "checkpoints" / "global_step_1", tmp_path / "marker"
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    reseal(path)
    message = ranks.run(1, message_of_load, folder, path)[0]
    assert "mkdir" in message and not marker.exists()


def test_a_hostile_tensor_file_runs_nothing(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1])
    path, marker = tmp_path / "checkpoints" / "global_step_1", tmp_path / "marker"
    victim = next(path.glob("*.distcp"))
    bomb = pickle.dumps(Bomb(marker), protocol=2)
    victim.write_bytes(bomb * (victim.stat().st_size // len(bomb)))
    reseal(path)
    for message in ranks.run(2, message_of_load, folder, path):
        assert message is not None and "rank" in message
    assert not marker.exists()


def test_a_pickled_entry_is_refused(ranks, tmp_path):
    def with_bytes(out):
        import torch.distributed.checkpoint as dcp

        dcp.save({"model.x": {"a": 1}}, checkpoint_id=out, no_dist=True)

    from shardyard.checkpoint.safe_reader import read_metadata

    with_bytes(tmp_path / "c")
    with pytest.raises(UserError, match="pickle"):
        read_metadata(tmp_path / "c")


def test_an_output_dir_with_another_run_is_refused_or_moved_aside(tmp_path):
    out = tmp_path / "out"
    assert prepare_output_dir(out, resuming=False, overwrite=False) is None
    assert prepare_output_dir(out, resuming=False, overwrite=False) is None  # still empty
    (out / "metrics.jsonl").write_text("x")
    with pytest.raises(UserError, match="overwrite_output_dir"):
        prepare_output_dir(out, resuming=False, overwrite=False)
    assert prepare_output_dir(out, resuming=True, overwrite=False) is None
    for _ in range(2):  # twice within a second: both old runs stay
        (out / "metrics.jsonl").write_text("x")
        moved = prepare_output_dir(out, resuming=False, overwrite=True)
        assert moved is not None and moved.name.startswith("out.old-") and (moved / "metrics.jsonl").exists()
    assert len(list(tmp_path.glob("out.old-*"))) == 2 and list(out.iterdir()) == []


def test_an_output_dir_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="output_dir"):
        prepare_output_dir(tmp_path / "file" / "out", resuming=False, overwrite=False)


def test_after_going_back_to_an_earlier_step_the_newest_is_what_was_saved_last(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    left = ranks.run(2, save_with_limit, folder, tmp_path, 2, [5, 10, 6])[0]
    assert left == ["global_step_10", "global_step_6", "latest"]
    assert CheckpointStore(tmp_path, save_total_limit=None).latest().name == "global_step_6"


def test_an_output_folder_as_checkpoint_is_refused_with_the_checkpoint_in_it(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path / "run", None, [3])
    with pytest.raises(UserError, match=r"did you mean .*global_step_3"):
        CheckpointStore(tmp_path, save_total_limit=None).resolve(str(tmp_path / "run"))


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"files": {"a": 1}, "format": 1}', "null", "not json"])
def test_a_manifest_of_another_form_is_a_reason_and_no_crash(tmp_path, manifest):
    path = fake_checkpoint(tmp_path, 1)
    (path / "manifest.json").write_text(manifest)
    assert "cannot be read" in str(fault_of(path))
    assert CheckpointStore(tmp_path, save_total_limit=None).latest() is None


def save_on_a_full_disk(out):
    """Rank 1 may write no file above 1 MiB, which is what a full disk looks like to it."""
    import resource

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    store = CheckpointStore(out, save_total_limit=1)
    store.save(1, model=model, optimizer=None, run_state={"step": 1})
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        store.save(2, model=model, optimizer=None, run_state={"step": 2})
    except UserError as error:
        return str(error)
    return None


def test_a_full_disk_on_one_rank_is_everyone_s_error_and_the_previous_checkpoint_stays(ranks, tmp_path):
    for message in ranks.run(2, save_on_a_full_disk, tmp_path):
        assert message is not None and "global_step_2" in message and "rank 1" in message
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["global_step_1", "latest"]
    assert CheckpointStore(tmp_path, save_total_limit=None).latest().name == "global_step_1"


def uneven_model(world_size):
    """Rows that do not divide, a dimension smaller than the world, a bool and an empty buffer."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1, bias=False))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("nothing", torch.empty(0, 3))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def save_uneven(out, world_size):
    import torch

    torch.manual_seed(0)
    model, optimizer = uneven_model(world_size)
    for _ in range(2):
        model(torch.ones(3, 5)).sum().backward()
        optimizer.step()
    CheckpointStore(out, save_total_limit=None).save(2, model=model, optimizer=optimizer, run_state={})
    return contents(model, optimizer)


def load_uneven(path, world_size):
    import torch

    torch.manual_seed(1)
    model, optimizer = uneven_model(world_size)
    model.mask.zero_()
    CheckpointStore(path.parents[1], save_total_limit=None).load(path, model=model, optimizer=optimizer)
    return contents(model, optimizer)


def contents(model, optimizer):
    from shardyard.checkpoint.state import model_tensors, optimizer_tensors

    return whole(model_tensors(model) | optimizer_tensors(model, optimizer))


@pytest.mark.parametrize("written_by", [1, 2, 4])
def test_uneven_shards_and_odd_buffers_come_back_on_any_number_of_ranks(ranks, tmp_path, written_by):
    wanted = ranks.run(written_by, save_uneven, tmp_path, written_by)[0]
    assert len(wanted) == 3 + 2 + 3 * 3  # parameters, persistent buffers, two moments and a count for each
    assert wanted["optimizer.0.weight.step"] == 2 and wanted["model.mask"].tolist() == [1, 0, 1]
    for world_size in (1, 2, 4):
        path = tmp_path / "checkpoints" / "global_step_2"
        for found in ranks.run(world_size, load_uneven, path, world_size):
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_a_rank_s_own_plain_state_beside_a_sharded_parameter_is_not_saved(ranks):
    assert (
        ranks.run(2, plain_state_message)
        == ["TypeError: optimizer.weight.m is a plain tensor beside a sharded parameter"] * 2
    )


def plain_state_message():
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from shardyard.checkpoint.state import optimizer_tensors

    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["m"] = torch.zeros(2, 4)
    try:
        optimizer_tensors(model, optimizer)
    except TypeError as error:
        return f"TypeError: {error}"


def test_what_a_run_reads_is_neither_moved_nor_written_over(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for output_dir, overwrite in ((model, True), (model, False), (tmp_path, True)):
        (tmp_path / "metrics.jsonl").write_text("x")
        with pytest.raises(UserError, match="name another"):
            prepare_output_dir(output_dir, resuming=False, overwrite=overwrite, inputs=[model])
    assert (model / "config.json").exists()


def test_the_folder_of_the_shell_is_not_moved_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("x")
    with pytest.raises(UserError, match="name another"):
        prepare_output_dir(Path("."), resuming=False, overwrite=True)


def test_a_linked_output_dir_stays_a_link(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "disk" / "run" / "metrics.jsonl").write_text("x")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    moved = prepare_output_dir(tmp_path / "out", resuming=False, overwrite=True)
    assert moved is not None and moved.parent == tmp_path / "disk"
    assert (tmp_path / "out").is_symlink() and list((tmp_path / "out").iterdir()) == []


def save_without_gradients(out, trained):
    """One step that only ``trained`` parameters take part in."""
    import torch

    torch.manual_seed(0)
    model, optimizer = uneven_model(1)
    for name, parameter in model.named_parameters():
        if name in trained:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    CheckpointStore(out, save_total_limit=None).save(2, model=model, optimizer=optimizer, run_state={})
    return contents(model, optimizer)


def resume_and_step(path):
    import torch

    model, optimizer = uneven_model(1)
    store = CheckpointStore(path.parents[1], save_total_limit=None)
    restored = store.load(path, model=model, optimizer=optimizer)
    found = {name: value.copy() for name, value in contents(model, optimizer).items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return restored.has_optimizer, found, contents(model, optimizer)


@pytest.mark.parametrize("trained", [(), ("0.weight", "0.bias")], ids=["none", "some"])
def test_parameters_that_never_had_a_gradient_have_their_state_in_the_checkpoint(ranks, tmp_path, trained):
    saved = ranks.run(1, save_without_gradients, tmp_path, trained)[0]
    path = tmp_path / "checkpoints" / "global_step_2"
    has_optimizer, found, after = ranks.run(1, resume_and_step, path)[0]
    assert has_optimizer and len(found) == 3 + 2 + 3 * 3
    assert found.keys() == saved.keys() and all(np.array_equal(found[key], saved[key]) for key in saved)
    for name in ("0.weight", "0.bias", "1.weight"):
        assert found[f"optimizer.{name}.step"] == (name in trained)
        assert after[f"optimizer.{name}.step"] == 1 + (name in trained)
        # The first update of AdamW with a gradient of 1 is lr, weight decay apart.
        if name not in trained:
            decayed = found[f"model.{name}"] * (1 - 1e-2 * 1e-2)
            assert np.allclose(after[f"model.{name}"], decayed - 1e-2, atol=1e-6)


def test_latest_says_what_it_passes_over(model_zoo, ranks, tmp_path, caplog):
    folder = model_zoo.folder("qwen3")
    ranks.run(1, save_with_limit, folder, tmp_path, None, [1, 2])
    victim = next((tmp_path / "checkpoints" / "global_step_2").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with caplog.at_level("WARNING", "shardyard.checkpoint"):
        assert CheckpointStore(tmp_path, save_total_limit=None).resolve("latest").name == "global_step_1"
    assert "passing over" in caplog.text and victim.name in caplog.text
