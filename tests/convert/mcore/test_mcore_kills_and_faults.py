"""Conversions that are killed go on; folders that are damaged, hostile or a training run's are told apart."""

from __future__ import annotations

import enum
import errno
import io
import os
import pickle
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.mcore import DictWeights, Marker, differences, random_weights, tiny_config
from support.ranks import RankFailure, RankPool

from shardyard.convert.mcore import Given, McoreLayout, McoreWeights, write_mcore
from shardyard.errors import UserError

LAYOUT = McoreLayout(tp=2, pp=2)
ITERATION, FILE, LATEST = "iter_0000001", "model_optim_rng.pt", "latest_checkpointed_iteration.txt"


def source_of(tmp_path: Path, family: str = "qwen3", **changes: Any) -> DictWeights:
    return random_weights(tmp_path / "hf", tiny_config(family, **changes))


class Died(BaseException):
    """Ends a conversion as abruptly as an exception can."""


@pytest.mark.parametrize("after", [1, 14, 29, 30, 45, 60])
def test_a_conversion_that_ended_anywhere_goes_on(after: int, tmp_path: Path) -> None:
    """pp 2 makes two pairs of files from 58 reads; whole pairs are kept, and nothing else is left."""
    source, target = source_of(tmp_path), tmp_path / "mcore"
    whole = write_mcore(source, tmp_path / "unbroken", LAYOUT)
    assert (whole.files, whole.kept) == (4, 0)
    reads = source.read_count

    class Dying(DictWeights):
        def read(self, name: str) -> torch.Tensor:
            if self.read_count == after:
                raise Died
            return super().read(name)

    survives = after >= reads
    try:
        write_mcore(Dying(source.folder, source.config, source.tensors), target, LAYOUT)
    except Died:
        assert not survives
        assert not (target / LATEST).exists()
        if target.exists():
            assert [p.name for p in target.rglob("*.tmp-*")] == []
            with pytest.raises(UserError, match="no Megatron-core checkpoint"):
                McoreWeights(target, source.config)
        done = write_mcore(source, target, LAYOUT)
        assert done.kept == (2 if after >= reads // 2 else 0)
    assert differences(source.tensors, McoreWeights(target)) == []
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {str(path.relative_to(whole.folder)) for path in whole.folder.rglob("*")}


class Killed(DictWeights):
    """Ends the process at the fortieth read, of 58, as the kernel would."""

    def read(self, name: str) -> torch.Tensor:
        if self.read_count == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(name)


def convert_and_be_killed(folder: Path) -> None:
    source = source_of(folder)
    write_mcore(Killed(source.folder, source.config, source.tensors), folder / "mcore", LAYOUT)


def test_a_killed_process_leaves_no_complete_looking_folder_and_the_next_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    with pytest.raises(RankFailure, match="exit code -9"):
        ranks.run(1, convert_and_be_killed, tmp_path, init_process_group=False)
    assert not (target / LATEST).exists()
    left = [path for path in target.rglob("*") if ".tmp-" in path.name]
    assert len(left) == 2  # the second stage's files, under other names
    assert write_mcore(source, target, LAYOUT).kept == 2
    assert differences(source.tensors, McoreWeights(target)) == []
    assert [path for path in target.rglob("*") if ".tmp-" in path.name] == []


def test_another_job_in_the_folder_is_refused(tmp_path: Path) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    write_mcore(source, target, LAYOUT)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="not empty"):
        write_mcore(source, target, McoreLayout())
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before


def break_writes(monkeypatch: pytest.MonkeyPatch, call: str, after: int, code: int) -> None:
    real, count = getattr(os, call), [0]

    def broken(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, call, broken)


@pytest.mark.parametrize(
    ("call", "after", "code"),
    [
        ("posix_fallocate", 1, errno.ENOSPC),
        ("posix_fallocate", 3, errno.EDQUOT),
        ("pwrite", 30, errno.ENOSPC),
        ("fsync", 6, errno.EIO),
    ],
)
def test_a_disk_that_fails_is_one_message_and_leaves_nothing_half_done(
    call: str, after: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    with monkeypatch.context() as broken:
        break_writes(broken, call, after, code)
        with pytest.raises(UserError, match=os.strerror(code)) as told:
            write_mcore(source, target, LAYOUT)
    assert str(target) in str(told.value)
    assert [path for path in tmp_path.rglob("*") if ".tmp-" in path.name] == []
    assert not (target / LATEST).exists()
    write_mcore(source, target, LAYOUT)
    assert differences(source.tensors, McoreWeights(target)) == []


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path)

    class Lying(DictWeights):
        def read(self, name: str) -> torch.Tensor:
            return super().read(name)[:1]

    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is not what its header says"):
        write_mcore(Lying(source.folder, source.config, source.tensors), tmp_path / "mcore", LAYOUT)


def test_a_tensor_is_read_once_for_all_tensor_parallel_ranks(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen3_moe")
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=4))
    assert source.read_count == len(source.tensors)


# Reading


def rank_path(folder: Path, name: str = "mp_rank_00_000") -> Path:
    return folder / ITERATION / name / FILE


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("place", ["args", "model", "optimizer", "whole", "old format"])
def test_a_pickle_that_would_run_is_refused_and_has_not_run(place: str, tmp_path: Path) -> None:
    source, target, marker = source_of(tmp_path), tmp_path / "mcore", tmp_path / "marker"
    write_mcore(source, target, LAYOUT)
    path = rank_path(target)
    if place == "whole":
        torch.save(Marker(marker), path)
    elif place == "old format":
        path.write_bytes(pickle.dumps({"model": {}, "args": Marker(marker)}))
    else:
        rewrite(path, lambda content: content.update({place: {"x": Marker(marker)}}))
    with pytest.raises(UserError, match=f"{FILE} is not read: .*(open_marker, which|no file of torch.save)"):
        McoreWeights(target)
    assert not marker.exists()
    if place != "old format":
        torch.load(path, weights_only=False)
        assert marker.exists()  # it would have been made


def test_a_torchscript_program_is_not_loaded(tmp_path: Path) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    write_mcore(source, target, LAYOUT)
    with zipfile.ZipFile(rank_path(target), "a") as archive:
        archive.writestr("archive/constants.pkl", b"")  # by which torch.load knows one, and loads its code
    with pytest.raises(UserError, match="TorchScript program"):
        McoreWeights(target)


class AttnBackend(enum.Enum):
    """Stands for the enums of megatron.core in the arguments of a training run."""

    auto = 5


def test_files_of_a_training_run_are_read_without_what_is_not_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer, random states, extra states; arguments with enums of a package that is not imported."""
    source, target = source_of(tmp_path), tmp_path / "mcore"
    write_mcore(source, target, LAYOUT)
    module = type(sys)("megatron.core.transformer.enums_of_the_test")
    module.AttnBackend = AttnBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(AttnBackend, "__module__", module.__name__)

    def train(content: dict[str, Any]) -> None:
        content["args"].attention_backend = AttnBackend.auto
        content["args"].params_dtype = torch.bfloat16
        content["args"].lr = np.float64(0.1)
        content["optimizer"] = {"param_groups": [{"lr": np.float32(1)}], "state": {0: torch.ones(3)}}
        content["rng_state"] = [{"np_rng_state": np.random.get_state(), "random": (3, (1, 2), None)}]
        content["opt_param_scheduler"] = {"max_lr": 1.0}
        content["model"]["decoder.layers.0.self_attention._extra_state"] = None
        content["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(0, dtype=torch.uint8)

    for path in target.rglob(FILE):
        rewrite(path, train)
    monkeypatch.delitem(sys.modules, module.__name__)
    (target / LATEST).write_text("release\n")
    (target / ITERATION).rename(target / "release")
    assert differences(source.tensors, McoreWeights(target)) == []
    assert module.__name__ not in sys.modules


def test_a_folder_without_arguments_is_read_by_its_folders_and_names(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, McoreLayout, Given]] = {
        "pp": ("qwen3", McoreLayout(pp=2), Given()),
        "ep": ("qwen3_moe", McoreLayout(ep=2), Given()),
        "uneven": ("qwen3", McoreLayout(pp=2, num_layer_list=(3, 1)), Given()),
        "vpp": ("qwen3", McoreLayout(pp=2, vpp=1), Given()),
        "noop": ("qwen3", McoreLayout(pp=3, noop_layers=(0, 5)), Given(noop_layers=(0, 5))),
        "whole experts": ("mixtral", McoreLayout(tp=2, ep=2, expert_tp=1), Given()),
        "whole grouped": ("mixtral", McoreLayout(tp=2, ep=4, expert_tp=1, grouped=True), Given(expert_tp=1)),
        "extended": ("mixtral", McoreLayout(tp=2, ep=2, moe_tp_extend_ep=True), Given(moe_tp_extend_ep=True)),
        "dualpipev": ("qwen3", McoreLayout(pp=2, schedules_method="dualpipev"),
                      Given(schedules_method="dualpipev")),
    }  # fmt: skip
    for name, (family, layout, given) in cases.items():
        source = random_weights(tmp_path / name / "hf", tiny_config(family))
        write_mcore(source, tmp_path / name / "mcore", layout)
        for path in (tmp_path / name).rglob(FILE):
            rewrite(path, lambda content: content.pop("args"))
        read = McoreWeights(tmp_path / name / "mcore", given=given)
        assert (read.layout, differences(source.tensors, read)) == (layout, []), name


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    source, whole = source_of(tmp_path), tmp_path / "whole"
    write_mcore(source, whole, LAYOUT)
    key = "decoder.layers.1.mlp.linear_fc2.weight"

    def without(content: dict[str, Any]) -> None:
        del content["model"][key]

    def narrow(content: dict[str, Any]) -> None:
        content["model"][key] = content["model"][key][:-1]

    def more(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.1.mlp.linear_fc2.bias"] = torch.zeros(16)

    def wide(content: dict[str, Any]) -> None:
        content["model"][key] = content["model"][key].float()

    first, second, last = "mp_rank_00_000", "mp_rank_01_000", "mp_rank_01_001"
    faults: list[tuple[Callable[[Path], object], str]] = [
        (lambda f: shutil.rmtree(rank_path(f, last).parent), r"mp_rank_01_001 is missing"),
        (lambda f: [shutil.rmtree(p) for p in (f / ITERATION).glob("mp_rank_*_001")], r"_001 is missing"),
        (lambda f: rank_path(f, last).unlink(), rf"mp_rank_01_001/{FILE} is missing"),
        (lambda f: rewrite(rank_path(f, second), without), rf"mp_rank_01_000/{FILE} lacks {key}"),
        (lambda f: rewrite(rank_path(f, second), narrow), r"linear_fc2\.weight does not fit the mo"),
        (lambda f: rewrite(rank_path(f, second), wide), r"does not fit the model: .*several dtypes"),
        (lambda f: rewrite(rank_path(f, second), more), r"mp_rank_01_000/.*holds .*fc2\.bias, for"),
        (lambda f: rewrite(rank_path(f), lambda content: content.pop("model")), r"holds no model"),
        (lambda f: torch.save([1], rank_path(f)), r"holds no model"),
        (lambda f: os.truncate(rank_path(f, first), 2000), rf"{FILE} is not read: it is damaged"),
        (lambda f: rank_path(f).write_bytes(b"PK"), r"damaged or no file of torch.save"),
        (lambda f: (f / LATEST).unlink(), rf"no Megatron-core checkpoint: it holds no readable {LATEST}"),
        (lambda f: (f / LATEST).write_text("7"), r"names iteration 7, but .*iter_0000007 is missing"),
        (lambda f: (f / LATEST).write_text("../x"), r"holds '\.\./x' instead of the number of an iteration"),
        (lambda f: (f / "config.json").unlink(), r"config.json is missing; name the folder"),
        (lambda f: (f / "config.json").write_text("["), r"config.json is not read"),
    ]  # fmt: skip
    for number, (harm, words) in enumerate(faults):
        folder = Path(shutil.copytree(whole, tmp_path / f"copy{number}"))
        harm(folder)
        with pytest.raises(UserError, match=words):
            McoreWeights(folder)


def test_a_head_that_a_tied_config_would_lose_is_refused(tmp_path: Path) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    write_mcore(source, target, LAYOUT)
    config = {**source.config, "tie_word_embeddings": True}
    with pytest.raises(UserError, match=r"output_layer\.weight is not the embedding.*tie_word_embeddings"):
        McoreWeights(target, config)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    source, target = source_of(tmp_path), tmp_path / "mcore"
    write_mcore(source, target, LAYOUT)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "llama"}, r"holds decoder\.layers\.0\.self_attention\.[qk]_layernorm.* a llama"),
        ({"num_hidden_layers": 6}, r"lacks decoder\.layers\.2\."),
        ({"num_hidden_layers": 2}, r"holds decoder\.layers\.1\."),
        ({"num_key_value_heads": 2}, r"linear_qkv\.weight does not fit the model"),
        ({"vocab_size": 97}, r"the vocabulary.*97|vocabulary of 97"),
        ({"model_type": "gpt_neox"}, r"model_type 'gpt_neox' has no Megatron-core form here"),
    ]  # fmt: skip
    for changes, words in cases:
        with pytest.raises(UserError, match=words):
            McoreWeights(target, {**source.config, **changes})


def test_written_files_name_nothing_but_tensors_and_a_namespace(tmp_path: Path) -> None:
    source = source_of(tmp_path, rope_scaling={"rope_type": "yarn"}, torch_dtype="bfloat16", layers=[1, "a"])
    write_mcore(source, tmp_path / "mcore", McoreLayout())
    path, named = rank_path(tmp_path / "mcore", "mp_rank_00"), set()

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add(f"{module}.{name}")
            return super().find_class(module, name) if name == "Namespace" else lambda *_: None

        def persistent_load(self, pid: Any) -> None:
            return None

    with zipfile.ZipFile(path) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        data = archive.read(record)
    assert data[:2] == b"\x80\x04"  # protocol 4
    said = vars(Names(io.BytesIO(data)).load()["args"])
    assert named == {"argparse.Namespace", "collections.OrderedDict", "torch._utils._rebuild_tensor_v2",
                     "torch.BFloat16Storage"}  # fmt: skip
    assert (said["torch_dtype"], said["layers"], "rope_scaling" in said) == ("bfloat16", [1, "a"], False)
