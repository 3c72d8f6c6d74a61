"""An export comes to its place as a whole: whenever it is killed, the former one stands there or the new
one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import RankFailure

from shardyard.checkpoint.hf_files import INDEX, WEIGHTS, FileWriter, plan_files
from shardyard.checkpoint.placing import (
    put_in_place,
    remove_export_leftovers,
    remove_leftovers,
    temporary_folder,
)

TENSORS = 6
FORMS = {"one": 1, "three": 3, "two": 2}
"""Files of an export: six tensors of 16 bytes, so that each number divides them."""


def fill(folder: Path, value: float, files: int) -> Path:
    """A complete export whose tensors are all ``value``."""
    plan = plan_files(
        {f"w{n}": ((4,), torch.float32) for n in range(TENSORS)}, shard_bytes=16 * TENSORS / files
    )
    assert len(plan.files) == files
    for file in plan.files:
        with FileWriter(file, folder / file.name) as writer:
            for name in file.places:
                writer.write(name, torch.full((4,), value))
            writer.finish()
    if (index := plan.index()) is not None:
        (folder / INDEX).write_text(index)
    (folder / "config.json").write_text(json.dumps({"value": value}))
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "notes.txt").write_text("beside")
    return folder


def read(folder: Path) -> set[float] | None:
    """The values that a reader finds by transformers' rule; None where it finds no weights."""
    if (folder / WEIGHTS).exists():
        found = load_file(folder / WEIGHTS)
    elif (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        found = {}
        for name in set(weight_map.values()):  # which raises where a file is missing
            inside = load_file(folder / name)
            found |= {key: inside[key] for key, where in weight_map.items() if where == name}
    else:
        return None
    assert found.keys() == {f"w{n}" for n in range(TENSORS)}
    return {value for tensor in found.values() for value in tensor.tolist()}


class Stop(BaseException):
    """The power cut."""


CHANGES: list[tuple[Any, str]] = [(Path, "replace"), (Path, "rename"), (Path, "unlink"), (os, "link")]


def stopping_at(patch: pytest.MonkeyPatch, number: int, stop: Callable[[], None]) -> list[int]:
    """Let the folder's ``number``-th change not happen and nothing after it; the list counts changes."""
    made = [0]

    def counted(change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if made[0] == number:
                stop()
            made[0] += 1
            return change(*args, **kwargs)

        return call

    for home, name in CHANGES:
        patch.setattr(home, name, counted(getattr(home, name)))
    return made


def stop() -> None:
    raise Stop


def number_of_changes(ready: Path, out: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        made = stopping_at(patch, -1, stop)
        put_in_place(ready, out)
    return made[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(old, new, marks=() if "three" in (old, new) else pytest.mark.soak)
        for old in FORMS
        for new in FORMS
    ],
)
def test_whenever_it_is_cut_short_one_whole_export_is_there(tmp_path: Path, old: str, new: str) -> None:
    out = tmp_path / "rehearsal"
    out.mkdir()
    fill(out, 1.0, FORMS[old])
    changes = number_of_changes(fill(temporary_folder(out), 2.0, FORMS[new]), out)
    assert read(out) == {2.0} and changes > FORMS[new]
    seen = []
    for number in range(changes):
        out = tmp_path / str(number)
        out.mkdir()
        fill(out, 1.0, FORMS[old])
        ready = fill(temporary_folder(out), 2.0, FORMS[new])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            stopping_at(patch, number, stop)
            put_in_place(ready, out)
        seen.append(read(out))
        # The next start cleans up, and the next export goes through whatever it finds.
        remove_leftovers(out)
        assert not list(out.glob(".*")) and read(out) == seen[-1]
        put_in_place(fill(temporary_folder(out), 3.0, FORMS[new]), out)
        assert read(out) == {3.0}
        assert sorted(path.name for path in out.glob("*.safetensors*")) == names_of(FORMS[new])
    switch = seen.index({2.0}) if {2.0} in seen else len(seen)
    assert seen[:switch] == [{1.0}] * switch and seen[switch:] == [{2.0}] * (len(seen) - switch)
    assert switch > 0


def names_of(files: int) -> list[str]:
    if files == 1:
        return [WEIGHTS]
    return [*(f"model-{n + 1:05d}-of-{files:05d}.safetensors" for n in range(files)), INDEX]


def killed_in_place(out: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stopping_at(patch, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        put_in_place(fill(temporary_folder(out), 2.0, 3), out)


@pytest.mark.parametrize(
    "number", [4, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3, 5, 6, 7, 8, 9))]
)
def test_a_killed_process_leaves_one_whole_export(ranks: Any, tmp_path: Path, number: int) -> None:
    fill(tmp_path, 1.0, 3)
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks.run(1, killed_in_place, tmp_path, number, init_process_group=False)
    assert read(tmp_path) in ({1.0}, {2.0})
    put_in_place(fill(temporary_folder(tmp_path), 3.0, 3), tmp_path)
    assert read(tmp_path) == {3.0} and not list(tmp_path.glob(".*"))


def test_without_links_a_cut_leaves_the_former_export_the_new_one_or_none(tmp_path: Path) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    found: list[Any] = []
    for number in range(30):
        out = tmp_path / str(number)
        out.mkdir()
        fill(out, 1.0, 3)
        ready = fill(temporary_folder(out), 2.0, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", no_links)
            made = stopping_at(patch, number, stop)
            try:
                put_in_place(ready, out)
            except Stop:
                found.append(read(out))
                continue
            assert made[0] == number
        break
    assert [value for n, value in enumerate(found) if n == 0 or found[n - 1] != value] == [{1.0}, None, {2.0}]


def test_an_incomplete_former_export_is_not_completed_by_new_files(tmp_path: Path) -> None:
    """Its first file is missing: no moment shows the new first file beside the former others."""
    changes = 9
    for number in range(changes):
        out = tmp_path / str(number)
        out.mkdir()
        fill(out, 1.0, 3)
        (out / "model-00001-of-00003.safetensors").unlink()
        ready = fill(temporary_folder(out), 2.0, 3)
        with pytest.MonkeyPatch.context() as patch:
            stopping_at(patch, number, stop)
            try:
                put_in_place(ready, out)
            except Stop:
                if (out / INDEX).exists() and (out / "model-00001-of-00003.safetensors").exists():
                    assert read(out) == {2.0}
                continue
        assert read(out) == {2.0}


def test_a_new_folder_comes_into_being_by_one_change(tmp_path: Path) -> None:
    out = tmp_path / "checkpoints" / "global_step_2" / "hf"
    ready = fill(temporary_folder(out), 2.0, 3)
    assert ready.parent == out.parent and not out.exists()
    assert number_of_changes(ready, out) == 1
    assert read(out) == {2.0} and [path.name for path in out.parent.iterdir()] == ["hf"]


def test_leftovers_of_all_exports_of_a_run_go_and_nothing_else(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "global_step_4"
    for made in (tmp_path, step / "hf"):
        fill(temporary_folder(made), 2.0, 2)
    fill(tmp_path, 1.0, 3)
    kept = {".export-tmp", ".export-tmp-12345678x", "former-model.safetensors", "other.safetensors"}
    for name in kept:
        (tmp_path / name).write_text("the user's")
    (tmp_path / "former-model-00001-of-00002.safetensors").write_text("no index names it")
    remove_export_leftovers(tmp_path)
    assert read(tmp_path) == {1.0} and not list(step.iterdir())
    ours = {*names_of(3), "config.json", "more", "checkpoints"}
    assert {path.name for path in tmp_path.iterdir()} == kept | ours
