"""Data sets of hubs and of object stores, through clients that stand in for the real ones."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from shardyard.data.sources import iter_rows, resolve_datasets
from shardyard.data.sources.hub_layout import choose_files
from shardyard.errors import UserError

Repos = dict[str, dict[str, str]]


def rows(*names: str) -> str:
    return "".join(json.dumps({"instruction": name, "output": "r"}) + "\n" for name in names)


REPOS: Repos = {
    "org/plain": {
        "README.md": "no front matter",
        "train.jsonl": rows("t"),
        "test.jsonl": rows("e"),
        "load.py": "raise SystemExit",
        "dataset_infos.json": "{}",
    },
    "org/card": {
        "README.md": "---\nconfigs:\n- config_name: en\n  data_files:\n"
        "  - {split: train, path: [b.jsonl, 'x/a*.jsonl']}\n"
        "- config_name: fr\n  data_files: f.jsonl\n---\ntext",
        "b.jsonl": rows("b"),
        "x/a2.jsonl": rows("a2"),
        "x/a1.jsonl": rows("a1"),
        "x/y/a3.jsonl": rows("a3"),
        "f.jsonl": rows("f"),
    },
    "org/registry": {
        "dataset_info.json": json.dumps(
            {"own": {"file_name": "own.jsonl"}, "other": {"hf_hub_url": "org/plain", "split": "test"}}
        ),
        "own.jsonl": rows("own"),
    },
}


class Server:
    """What the stand-ins of all three clients serve from, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.down = False
        self.downloaded: list[str] = []
        self.tokens: set[str | None] = set()
        self.cache_dirs: set[Any] = set()

    def names(self, repo: str, token: str | None) -> list[str]:
        if self.down:
            raise ConnectionError("no route")
        self.tokens.add(token)
        if repo not in REPOS:
            raise ConnectionError(f"404: no repository\n{repo}")
        return list(REPOS[repo])

    def download(self, repo: str, name: str, token: str | None, cache_dir: Any) -> str:
        self.names(repo, token)
        self.cache_dirs.add(cache_dir)
        self.downloaded.append(name)
        path = self.folder / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(REPOS[repo][name], encoding="utf-8")
        return str(path)


def huggingface_hub(server: Server) -> dict[str, types.ModuleType]:
    class HfApi:
        def __init__(self, token: str | None = None) -> None:
            self._token = token

        def dataset_info(self, repo_id: str) -> Any:
            siblings = [types.SimpleNamespace(rfilename=name) for name in server.names(repo_id, self._token)]
            return types.SimpleNamespace(siblings=siblings, sha="commit")

    def hf_hub_download(
        repo_id: str, filename: str, *, repo_type: str, revision: str | None, token: Any, cache_dir: Any
    ) -> str:
        assert repo_type == "dataset" and revision in ("commit", None)
        return server.download(repo_id, filename, token, cache_dir)

    return {"huggingface_hub": module("huggingface_hub", HfApi=HfApi, hf_hub_download=hf_hub_download)}


def modelscope(server: Server) -> dict[str, types.ModuleType]:
    class HubApi:
        def __init__(self, token: str | None = None) -> None: ...

        def get_dataset_files(
            self, repo_id: str, *, recursive: bool, page_number: int, page_size: int, token: str | None
        ) -> list[dict[str, str]]:
            files = [{"Path": name, "Type": "blob"} for name in server.names(repo_id, token)]
            fill = [{"Path": f"folder{number}", "Type": "tree"} for number in range(page_size)]
            return [*fill, *files][(page_number - 1) * page_size : page_number * page_size]

    def dataset_file_download(dataset_id: str, file_path: str, *, cache_dir: Any, token: str | None) -> str:
        return server.download(dataset_id, file_path, token, cache_dir)

    return {
        "modelscope": module("modelscope"),
        "modelscope.hub": module("modelscope.hub"),
        "modelscope.hub.api": module("modelscope.hub.api", HubApi=HubApi),
        "modelscope.hub.file_download": module(
            "modelscope.hub.file_download", dataset_file_download=dataset_file_download
        ),
    }


def openmind_hub(server: Server) -> dict[str, types.ModuleType]:
    class OmApi:
        def list_repo_files(self, repo_id: str, *, token: str | None = None) -> list[str]:
            return server.names(repo_id, token)

    def om_hub_download(
        repo_id: str, filename: str, *, repo_type: str, token: str | None, cache_dir: Any
    ) -> str:
        assert repo_type == "dataset"
        return server.download(repo_id, filename, token, cache_dir)

    return {"openmind_hub": module("openmind_hub", OmApi=OmApi, om_hub_download=om_hub_download)}


def module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


HUBS = {
    "hf_hub_url": (huggingface_hub, "hf"),
    "ms_hub_url": (modelscope, "ms"),
    "om_hub_url": (openmind_hub, "om"),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """All three clients replaced, and a home without earlier downloads."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    server = Server(tmp_path / "served")
    for stand_in, _ in HUBS.values():
        for name, replacement in stand_in(server).items():
            monkeypatch.setitem(sys.modules, name, replacement)
    return server


def prompts(dataset: Any, folder: Path | str, **access: Any) -> list[list[str]]:
    entries = resolve_datasets(dataset, str(folder), **access)
    return [[row.data["instruction"] for row in iter_rows(of)] for of in entries]


@pytest.mark.parametrize("key", HUBS)
def test_a_hubs_split_is_read_and_nothing_else_is_downloaded(
    key: str, server: Server, tmp_path: Path
) -> None:
    token = HUBS[key][1]
    access = {"tokens": {"hf": "h", "ms": "m", "om": "o"}, "cache_dir": str(tmp_path / "cache")}
    assert prompts({key: "org/plain"}, tmp_path, **access) == [["t"]]
    assert sorted(server.downloaded) == ["README.md", "train.jsonl"]
    assert server.tokens == {token[0]} and server.cache_dirs == {str(tmp_path / "cache")}
    assert prompts({key: "org/plain", "split": "test"}, tmp_path) == [["e"]]


@pytest.mark.parametrize("key", HUBS)
def test_the_cards_subset_is_read_in_its_order(key: str, server: Server, tmp_path: Path) -> None:
    assert prompts({key: "org/card", "subset": "en"}, tmp_path) == [["b", "a1", "a2"]]
    assert prompts({key: "org/card", "subset": "fr"}, tmp_path) == [["f"]]
    assert prompts({key: "org/card", "folder": "x"}, tmp_path) == [["a1", "a2", "a3"]]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"hf_hub_url": "org/none"},
            r"hf_hub_url: org/none cannot be fetched from the .*404: no repository org",
        ),
        ({"ms_hub_url": "org/none"}, r"ms_hub_url: org/none cannot be fetched from ModelScope"),
        ({"om_hub_url": "org/none"}, r"om_hub_url: org/none cannot be fetched from the Modelers hub"),
        ({"hf_hub_url": "org/plain", "split": "dev"}, "no split 'dev'; found train, test"),
        ({"hf_hub_url": "org/plain", "subset": "en"}, "no subset 'en'; the card lists none"),
        ({"hf_hub_url": "org/card"}, "has several subsets; set subset to one of en, fr"),
        ({"hf_hub_url": "org/card", "subset": "de"}, "no subset 'de'; found en, fr"),
        ({"hf_hub_url": "org/card", "folder": "z"}, "no data file under z/; there are b.jsonl, f.jsonl"),
        ({"script_url": "x", "hf_hub_url": "org/plain"}, "scripts run code and are not read"),
    ],
)
def test_what_a_hub_does_not_have_is_one_message(
    dataset: Any, message: str, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_datasets(dataset, str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", HUBS)
def test_a_missing_client_is_told_with_what_installs_it(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huggingface_hub", "modelscope.hub.api", "openmind_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    package = "huggingface_hub" if key == "hf_hub_url" else r"'shardyard\[hubs\]'"
    with pytest.raises(UserError, match=f"{key}: needs the client of .*: pip install {package}"):
        resolve_datasets({key: "org/plain"}, str(tmp_path))


def test_without_a_network_the_real_client_gives_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="org/plain cannot be fetched from the Hugging Face hub: ") as caught:
        resolve_datasets({"hf_hub_url": "org/plain"}, str(tmp_path), cache_dir=str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", HUBS)
def test_without_a_network_the_files_of_the_last_download_are_used(
    key: str, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, cache = {key: "org/card", "subset": "en"}, str(tmp_path / "cache")
    assert prompts(dataset, tmp_path, cache_dir=cache) == [["b", "a1", "a2"]]
    if key == "hf_hub_url":
        assert prompts("own", "REMOTE:org/registry", cache_dir=cache) == [["own"]]
    server.down = True
    assert prompts(dataset, tmp_path, cache_dir=cache) == [["b", "a1", "a2"]]
    assert "no route" in caplog.text and "its 3 files of the last download are used" in caplog.text
    if key == "hf_hub_url":
        assert prompts("own", "REMOTE:org/registry", cache_dir=cache) == [["own"]]
    for other in ({**dataset, "subset": "fr"}, {**dataset, "split": "test"}):
        with pytest.raises(UserError, match=r"cannot be fetched from .*: no route"):
            resolve_datasets(other, str(tmp_path), cache_dir=cache)
    (server.folder / "org/card/x/a1.jsonl").unlink()
    with pytest.raises(UserError, match=r"cannot be fetched from .*: no route"):
        resolve_datasets(dataset, str(tmp_path), cache_dir=cache)


def test_online_makes_every_name_an_id_and_remote_takes_the_registry_of_a_repository(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "local.jsonl").write_text(rows("local"))
    local = {"file_name": str(tmp_path / "local.jsonl")}
    assert prompts(["org/plain", local], "ONLINE") == [["t"], ["local"]]
    assert prompts(["own", "other", local], "REMOTE:org/registry") == [["own"], ["e"], ["local"]]
    with pytest.raises(
        UserError, match=r"'owm' is neither .* org/registry/dataset_info.json; did you mean 'own'"
    ):
        resolve_datasets("owm", "REMOTE:org/registry")
    with pytest.raises(UserError, match=r"data\.dataset_dir: org/none cannot be fetched"):
        resolve_datasets("own", "REMOTE:org/none")


# Which files


@pytest.mark.parametrize(
    ("listing", "split", "chosen"),
    [
        (
            ["data/train-00001-of-00002-x.parquet", "data/train-00000-of-00002-y.parquet", "train.csv"],
            "train",
            [1, 0],
        ),
        (["data/extra-00000-of-00001.parquet"], "extra", [0]),
        (["a/training/x.csv", "a/dev/x.csv", "train.csv"], "validation", [1]),
        (["my_train_1.csv", "my-eval.csv", "trainer.csv"], "train", [0]),
        (["my_train_1.csv", "my-eval.csv", "trainer.csv"], "test", [1]),
        (["b.jsonl", "a.jsonl", ".hidden.jsonl", "x/.git/a.jsonl", "config.json"], "train", [1, 0]),
    ],
)
def test_names_tell_the_split(listing: list[str], split: str, chosen: list[int]) -> None:
    found = choose_files(listing, "", subset=None, split=split, folder=None, where="r")
    assert found == [listing[number] for number in chosen]


@pytest.mark.parametrize(
    ("data_files", "chosen"),
    [
        ("a.csv", ["a.csv"]),
        ("./d", ["d/b.csv", "d/e/c.csv"]),
        ("d/*", ["d/b.csv", "d/e/c.csv"]),
        ("d/*.csv", ["d/b.csv"]),
        ("**/*.csv", ["a.csv", "d/b.csv", "d/e/c.csv"]),
        ("d/**/?.csv", ["d/b.csv", "d/e/c.csv"]),
        ("[!a].csv", None),
        ("d/[ab].csv", ["d/b.csv"]),
        ([{"split": "train", "path": "d/e/*"}, {"split": "test", "path": "a.csv"}], ["d/e/c.csv"]),
        ("../a.csv", None),
    ],
)
def test_the_cards_patterns_choose_files(data_files: Any, chosen: list[str] | None) -> None:
    card = (
        "---\r\n"
        + json.dumps({"configs": [{"config_name": "default", "data_files": data_files}]})
        + "\r\n---\r\n"
    )
    listing = ["d/e/c.csv", "d/b.csv", "a.csv", "../a.csv"]
    if chosen is None:
        with pytest.raises(UserError, match="no data file fits the patterns"):
            choose_files(listing, card, subset=None, split="train", folder=None, where="r")
    else:
        assert choose_files(listing, card, subset=None, split="train", folder=None, where="r") == chosen


def test_the_folder_of_a_config_is_where_its_patterns_begin() -> None:
    configs = [
        {"config_name": "en", "data_dir": "langs/en"},
        {"config_name": "fr", "data_dir": "langs/fr", "data_files": "x*"},
    ]
    card = "---\n" + json.dumps({"configs": configs}) + "\n---\n"
    listing = ["langs/en/train.csv", "langs/en/test.csv", "langs/fr/x.csv", "langs/fr/y.csv"]
    for subset, chosen in (("en", ["langs/en/train.csv"]), ("fr", ["langs/fr/x.csv"])):
        assert choose_files(listing, card, subset=subset, split="train", folder=None, where="r") == chosen


@pytest.mark.parametrize(
    ("listing", "card", "message"),
    [
        (["a.py", "b.zip"], "", "r: the repository has no file of a type that is read; scripts are not run"),
        (["a.csv"], "---\nconfigs: [\n---\n", "r: the front matter of its README.md is not valid YAML"),
        (["a.csv"], "---\nconfigs:\n- data_files: !!python/name:os.system\n---\n", "is not valid YAML"),
    ],
)
def test_a_repository_that_cannot_be_used_is_one_message(listing: list[str], card: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_files(listing, card, subset=None, split="train", folder=None, where="r")


# Object stores


class Store(MemoryFileSystem):
    """Files in memory under the scheme of a real store."""

    protocol = "s3"
    store: dict[str, Any] = {}  # noqa: RUF012  (the class's own, as its base has it)
    pseudo_dirs = [""]  # noqa: RUF012
    reads = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("s3://").strip("/")

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> Any:
        Store.reads += 1
        return super().get_file(rpath, lpath, *args, **kwargs)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setitem(_registry, "s3", Store)
    Store.reads = 0
    yield Store(skip_instance_cache=True)
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]


def test_an_object_is_downloaded_once_for_each_of_its_versions(store: Store, tmp_path: Path) -> None:
    dataset = {"cloud_file_name": "s3://bucket/a.jsonl"}
    for content, reads in (("one", 1), ("one", 1), ("two", 2)):
        if Store.reads < reads:
            store.pipe_file("/bucket/a.jsonl", rows(content).encode())
        assert prompts(dataset, tmp_path, cache_dir=str(tmp_path / "c")) == [[content]]
        assert Store.reads == reads
    assert not [path for path in (tmp_path / "c").rglob(".*")]


def test_a_prefix_is_its_data_files_in_order(store: Store, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.md", "sub/c.jsonl"):
        store.pipe_file(f"/bucket/d/{name}", rows(name).encode())
    assert prompts({"cloud_file_name": "s3://bucket/d"}, tmp_path, cache_dir=str(tmp_path)) == [
        ["a.jsonl", "b.jsonl"]
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/none.jsonl", "s3://bucket/none.jsonl cannot be fetched: "),
        ("s3://bucket/docs", "s3://bucket/docs holds none of the json, jsonl"),
        ("gs://bucket/a.jsonl", "gs:// needs the package gcsfs: pip install gcsfs"),
        ("memory://bucket/a.jsonl", "must begin with one of s3://, gs://, gcs://"),
    ],
)
def test_what_a_store_does_not_have_is_one_message(
    url: str, message: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    store.pipe_file("/bucket/docs/README.md", b"x")
    with pytest.raises(UserError, match=message) as caught:
        resolve_datasets({"cloud_file_name": url}, str(tmp_path), cache_dir=str(tmp_path))
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.jsonl*"))
