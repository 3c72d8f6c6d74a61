"""What a damaged, hostile or doubtful checkpoint folder is taken for; no weights are needed for that."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import Bomb, files_of, reseal

from shardyard.checkpoint import CheckpointStore, fault_of
from shardyard.checkpoint.manifest import read_manifest, verify
from shardyard.checkpoint.safe_reader import read_metadata
from shardyard.errors import UserError

STATE = {"step": 7, "settings": {"lr": 0.5}}


def fill_assets(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("a\nb\n")


def save(out: Path, *steps: int, assets: bool = False, best: int | None = None) -> Path:
    """Checkpoints of one matrix whose elements are the step; the folder of the last."""
    store = CheckpointStore(out, save_total_limit=None)
    for step in steps:
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.constant_(model.weight, step)
        store.save(
            step, model=model, optimizer=None, run_state={**STATE, "step": step},
            best=step == best, assets=fill_assets if assets else None,
        )  # fmt: skip
    return out / "checkpoints" / f"global_step_{steps[-1]}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, to be copied: the later one has assets."""
    out = tmp_path_factory.mktemp("saved")
    save(out, 3)
    save(out, 7, assets=True)
    return out


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def load_latest(run: Path) -> tuple[str | None, float]:
    model = torch.nn.Linear(4, 4, bias=False)
    found = CheckpointStore(run, save_total_limit=None).load_latest(model=model, optimizer=None)
    return (None if found is None else found.path.name), model.weight[0, 0].item()


EVERY_FILE = [
    ".metadata",
    "__0_0.distcp",
    "assets/config.json",
    "assets/sub/vocab.txt",
    "manifest.json",
    "run_state.json",
]


def test_the_manifest_lists_every_file_with_its_own_size_and_hash(saved):
    path = saved / "checkpoints" / "global_step_7"
    assert files_of(path) == EVERY_FILE
    held = json.loads((path / "manifest.json").read_text())
    assert sorted(held["files"]) == [name for name in EVERY_FILE if name != "manifest.json"]
    for name, facts in held["files"].items():
        data = (path / name).read_bytes()
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert (held["sequence"], held["ranks"]) == (2, 1) and verify(path) == []
    assert json.loads((path / "run_state.json").read_text()) == STATE


@pytest.mark.parametrize("harm", ["flip the first byte", "flip a byte", "truncate", "remove"])
@pytest.mark.parametrize("name", EVERY_FILE)
def test_harm_to_any_file_is_named_and_latest_passes_over_it(run, caplog, name, harm):
    path = run / "checkpoints" / "global_step_7"
    data = bytearray((path / name).read_bytes())
    if harm == "remove":
        (path / name).unlink()
    elif harm == "truncate":
        (path / name).write_bytes(data[:-1])
    else:
        data[0 if "first" in harm else len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    faults = verify(path)
    assert len(faults) == 1 and name in faults[0]
    assert load_latest(run) == ("global_step_3", 3.0)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("global_step_7" in line and name in line for line in warnings), warnings


@pytest.mark.soak
def test_no_flipped_bit_of_a_manifest_goes_unseen(run):
    path = run / "checkpoints" / "global_step_7"
    whole = (path / "manifest.json").read_bytes()
    for place in range(len(whole)):
        for bit in (1, 2, 8, 32, 128):
            harmed = bytearray(whole)
            harmed[place] ^= bit
            (path / "manifest.json").write_bytes(harmed)
            assert fault_of(path) is not None, (place, bit)
    (path / "manifest.json").write_bytes(whole)
    assert fault_of(path) is None


def test_with_every_checkpoint_damaged_there_is_none_to_load(run, caplog):
    for step in (3, 7):
        path = run / "checkpoints" / f"global_step_{step}" / "__0_0.distcp"
        path.write_bytes(path.read_bytes().replace(b"\x00", b"\x01"))
    assert load_latest(run)[0] is None
    assert {"global_step_3", "global_step_7"} <= set("".join(caplog.messages).replace("/", " ").split())


HOSTILE = {
    "a file above": {"files": {"../secret": {"bytes": 6, "sha256": "0" * 64}}},
    "an absolute file": {"files": {"/etc/hostname": {"bytes": 6, "sha256": "0" * 64}}},
    "a way around": {"files": {"assets/../../secret": {"bytes": 6, "sha256": "0" * 64}}},
    "a way that is none": {"files": {"./run_state.json": {"bytes": 6, "sha256": "0" * 64}}},
    "a nameless file": {"files": {"": {"bytes": 6, "sha256": "0" * 64}}},
    "letters for a terminal": {"files": {"\x1b[2J": {"bytes": 6, "sha256": "0" * 64}}},
    "elsewhere above": {"elsewhere": {"../secret": {"bytes": 6, "sha256": "0" * 64}}},
    "a negative size": {"files": {"run_state.json": {"bytes": -1, "sha256": ""}}},
    "a size beyond all disks": {"files": {"run_state.json": {"bytes": 10**30, "sha256": ""}}},
    "a size of text": {"files": {"run_state.json": {"bytes": "6", "sha256": ""}}},
    "a size of infinity": {"files": {"run_state.json": {"bytes": float("inf"), "sha256": ""}}},
    "a sequence of 5,000 digits": {"sequence": 10**4000},
    "no sequence": {"sequence": None},
    "a sequence that is a truth": {"sequence": True},
    "files in a list": {"files": ["run_state.json"]},
    "a future format": {"format": 3},
    "an unhashable format": {"format": [1]},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused_and_nothing_outside_is_read(run, what, monkeypatch):
    path = run / "checkpoints" / "global_step_7"
    (run / "checkpoints" / "secret").write_text("secret")
    reseal(path, **HOSTILE[what])
    opened: list[str] = []
    real_open = os.open

    def watched(name, *args, **kwargs):
        opened.append(str(name))
        return real_open(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    fault = fault_of(path)
    assert fault is not None and len(fault) < 500
    assert verify(path) and load_latest(run)[0] == "global_step_3"
    assert not any("secret" in name or "hostname" in name for name in opened)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ufeff{}", "NaN"])
@pytest.mark.parametrize("name", ["manifest.json", "run_state.json"])
def test_json_made_to_break_a_parser_is_a_reason_and_no_crash(run, name, text):
    path = run / "checkpoints" / "global_step_7"
    (path / name).write_text(text)
    if name == "run_state.json":
        reseal(path)
        with pytest.raises(UserError, match=r"run_state\.json is not read"):
            load_latest(run)
    else:
        assert "manifest.json" in str(fault_of(path)) and load_latest(run)[0] == "global_step_3"


def pickle_of(module: str, name: str, argument: str) -> bytes:
    """The bytes of ``module.name(argument)``, which need no such module here."""
    return b"c%s\n%s\n(V%s\ntR." % (module.encode(), name.encode(), argument.encode())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"),
        ("torch", "hub.load"), ("torch.serialization", "load"), ("pathlib", "Path.unlink"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("pathlib", "Path.write_text"), ("torch.distributed.checkpoint.filesystem", "FileSystem"),
    ],
)  # fmt: skip
def test_metadata_that_names_anything_else_is_refused(run, module, name):
    path = run / "checkpoints" / "global_step_7"
    (path / ".metadata").write_bytes(pickle_of(module, name, "touch marker"))
    reseal(path)
    with pytest.raises(UserError, match=r"\.metadata is not read: it names"):
        load_latest(run)


def test_a_bomb_in_each_file_of_a_checkpoint_runs_nothing(run, tmp_path):
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(marker))
    path = run / "checkpoints" / "global_step_7"
    for name in (".metadata", "run_state.json", "__0_0.distcp"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(bomb)
        reseal(path)
        with pytest.raises(UserError, match=r"global_step_7"):
            load_latest(run)
        (path / name).write_bytes(whole)
    (path / "manifest.json").write_bytes(bomb)
    assert load_latest(run)[0] == "global_step_3" and not marker.exists()


def changed_metadata(path: Path, change) -> None:
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)


def leads_to(name):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = name

    return change


def has_size(*size):
    def change(metadata):
        for entry in metadata.state_dict_metadata.values():
            entry.size = torch.Size(size)

    return change


def has_piece(offsets, sizes):
    def change(metadata):
        for entry in metadata.state_dict_metadata.values():
            entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size(offsets), torch.Size(sizes)

    return change


def begins_at(offset, length):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.offset, place.length = offset, length

    return change


def without(field):
    return lambda metadata: vars(metadata).pop(field)


def lists_nothing(metadata):
    metadata.state_dict_metadata = [1, 2]


def is_transformed(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leads_to("../secret"), "outside the folder"),
        (leads_to("/etc/hostname"), "outside the folder"),
        (leads_to("sub/__0_0.distcp"), "outside the folder"),
        (leads_to(7), "where a name belongs"),
        (has_size(10**12, 10**12), "another model"),
        (has_size(4), "other dimensions"),
        (has_piece((2, 0), (4, 4)), "outside its tensor"),
        (has_piece((0, 0), (2**62, 2**62)), "outside its tensor"),
        (begins_at(-1, 10), "where a count belongs"),
        (begins_at(2**70, 10), "where a count belongs"),
        (begins_at(2**50, 10), "loading checkpoint"),
        (without("state_dict_metadata"), "state_dict_metadata"),
        (lists_nothing, "lists no tensors"),
        (is_transformed, "transformed"),
    ],
)
def test_metadata_with_hostile_facts_is_refused(run, change, message):
    path = run / "checkpoints" / "global_step_7"
    (run / "checkpoints" / "secret").write_text("secret")
    changed_metadata(path, change)
    with pytest.raises(UserError, match=message):
        load_latest(run)


def test_metadata_is_read_as_torch_reads_it(tmp_path):
    dtypes = "float32 bfloat16 float16 int64 uint8 bool float8_e4m3fn".split()
    tensors = {f"model.{i}": torch.zeros(i, 3, dtype=getattr(torch, name)) for i, name in enumerate(dtypes)}
    dcp.save(tensors | {"model.s": torch.tensor(1.0)}, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        wanted = pickle.load(file)
    found = read_metadata(tmp_path)
    assert found.state_dict_metadata == wanted.state_dict_metadata and len(found.state_dict_metadata) == 8
    assert found.storage_data == wanted.storage_data and found.version == wanted.version


def test_a_pickle_cannot_change_the_classes_it_names(run):
    """A pickle may set attributes of what it names: then of an inert type of its own."""
    path = run / "checkpoints" / "global_step_7"
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    # MARK None {"__init__": StorageMeta} TUPLE BUILD: setattr on the class itself
    harmful = name + b"(N}V__init__\nctorch.distributed.checkpoint.metadata\nStorageMeta\nstb."
    (path / ".metadata").write_bytes(harmful)
    reseal(path)
    before = torch.distributed.checkpoint.metadata.Metadata.__init__
    with pytest.raises(UserError, match=r"\.metadata is not read"):
        load_latest(run)
    assert torch.distributed.checkpoint.metadata.Metadata.__init__ is before


def test_the_newest_is_what_was_saved_last_whatever_the_clocks_say(tmp_path):
    save(tmp_path, 5, 10, 6)
    folder = tmp_path / "checkpoints"
    for age, step in enumerate((6, 10, 5)):  # as if node clocks ran backwards
        for path in (folder / f"global_step_{step}").rglob("*"):
            os.utime(path, (10**9 + age * 10**6,) * 2)
    assert load_latest(tmp_path) == ("global_step_6", 6.0)


def test_of_two_names_of_one_step_the_later_save_counts(tmp_path):
    path = save(tmp_path, 4)
    path.rename(path.with_name("global_step_04"))
    save(tmp_path, 4)
    assert load_latest(tmp_path)[0] == "global_step_4"
    names = [found.name for found in CheckpointStore(tmp_path, save_total_limit=None).complete()]
    assert names == ["global_step_04", "global_step_4"]
    assert [read_manifest(path.with_name(name)).sequence for name in names] == [1, 2]


def test_a_linked_checkpoint_loads_and_retention_leaves_what_it_points_to(tmp_path):
    path = save(tmp_path / "other", 2)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "global_step_2").symlink_to(path)
    assert load_latest(tmp_path / "run") == ("global_step_2", 2.0)
    store = CheckpointStore(tmp_path / "run", save_total_limit=1)
    store.save(3, model=torch.nn.Linear(4, 4, bias=False), optimizer=None, run_state={})
    assert [found.name for found in store.complete()] == ["global_step_3"]
    assert not (folder / "global_step_2").is_symlink() and verify(path) == []


def test_retention_keeps_what_a_kept_link_points_to(tmp_path):
    path = save(tmp_path, 1)
    path.with_name("global_step_9").symlink_to(path.name)  # another name for the same save
    store = CheckpointStore(tmp_path, save_total_limit=2)
    store.save(2, model=torch.nn.Linear(4, 4, bias=False), optimizer=None, run_state={})
    assert {found.name for found in store.complete()} == {"global_step_1", "global_step_9", "global_step_2"}


def test_a_link_in_a_circle_is_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    loop = tmp_path / "checkpoints" / "global_step_8"
    loop.symlink_to(loop.name)
    assert load_latest(tmp_path)[0] == "global_step_1"


def test_cleaning_gives_a_name_back_to_what_was_not_replaced(tmp_path):
    """A kill between the two renames of a replacement: neither the old nor the new one has its name."""
    path = save(tmp_path, 1, 2)
    folder = path.parent
    path.rename(folder / ".tmp-global_step_global_step_2.replaced")
    (folder / ".tmp-global_step_2").mkdir()
    (folder / ".tmp-global_step_latest").write_text("global_step_2\n")
    (folder / "notes.txt").write_text("mine")
    CheckpointStore(tmp_path, save_total_limit=None).clean()
    assert sorted(found.name for found in folder.iterdir()) == [
        "global_step_1", "global_step_2", "latest", "notes.txt",
    ]  # fmt: skip
    assert load_latest(tmp_path) == ("global_step_2", 2.0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path, monkeypatch, at_once):
    """Where names can be exchanged, and where they cannot (NFS)."""
    from shardyard.checkpoint import folder

    exchanged = []
    real = folder.exchange
    monkeypatch.setattr(folder, "exchange", lambda *paths: at_once and not exchanged.append(real(*paths)))
    path = save(tmp_path, 4)
    first = (path / "manifest.json").stat().st_ino
    save(tmp_path, 4)
    assert (path / "manifest.json").stat().st_ino != first and read_manifest(path).sequence == 2
    assert sorted(found.name for found in path.parent.iterdir()) == ["global_step_4", "latest"]
    assert exchanged == ([True] if at_once else [])


def test_cleaning_removes_the_old_one_when_its_replacement_is_there(tmp_path):
    path = save(tmp_path, 2)
    shutil.copytree(path, path.with_name(".tmp-global_step_global_step_2.replaced"))
    CheckpointStore(tmp_path, save_total_limit=None).clean()
    assert sorted(found.name for found in path.parent.iterdir()) == ["global_step_2", "latest"]


def test_looking_at_checkpoints_needs_no_torch(saved):
    code = (
        "import sys\nfrom shardyard.cli import main\n"
        f"assert main(['checkpoint', 'list', {str(saved)!r}]) == 0\nassert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "global_step_7" in found.stdout
