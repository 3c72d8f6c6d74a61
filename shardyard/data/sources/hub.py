"""Data sets of a hub: the files of one split, through the hub's own client; no code of theirs is run."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardyard.data.sources.cloud import one_line
from shardyard.data.sources.hub_layout import choose_files
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

_CARD = "README.md"
_LARGEST_CARD = 4 * 2**20
_DOWNLOADS_AT_ONCE = 8


@dataclass(frozen=True)
class Access:
    """The token of a hub, and where downloads are kept (None: the client's own folder)."""

    token: str | None = None
    cache_dir: str | None = None


@dataclass(frozen=True)
class Wanted:
    """The part of a repository that is wanted, as an entry's keys say."""

    subset: str | None = None
    split: str = "train"
    folder: str | None = None


class Client(Protocol):
    """What is used of a hub's client. ``version`` pins what ``files`` listed, where the hub tells it."""

    def files(self, repo: str) -> tuple[list[str], str | None]: ...

    def download(self, repo: str, name: str, version: str | None) -> str: ...


class _HuggingFace:
    def __init__(self, access: Access) -> None:
        self._package = importlib.import_module("huggingface_hub")
        self._access = access

    def files(self, repo: str) -> tuple[list[str], str | None]:
        info = self._package.HfApi(token=self._access.token).dataset_info(repo)
        return [sibling.rfilename for sibling in info.siblings or []], info.sha

    def download(self, repo: str, name: str, version: str | None) -> str:
        return self._package.hf_hub_download(
            repo,
            name,
            repo_type="dataset",
            revision=version,
            token=self._access.token,
            cache_dir=self._access.cache_dir,
        )


class _ModelScope:
    _PAGE = 100

    def __init__(self, access: Access) -> None:
        self._api = importlib.import_module("modelscope.hub.api").HubApi(token=access.token)
        self._download = importlib.import_module("modelscope.hub.file_download").dataset_file_download
        self._access = access

    def files(self, repo: str) -> tuple[list[str], str | None]:
        names: list[str] = []
        page: list[Any] = [None] * self._PAGE
        number = 0
        while len(page) >= self._PAGE:
            number += 1
            page = self._api.get_dataset_files(
                repo, recursive=True, page_number=number, page_size=self._PAGE, token=self._access.token
            )
            names += [item["Path"] for item in page if item.get("Type") != "tree"]
        return names, None

    def download(self, repo: str, name: str, version: str | None) -> str:
        return self._download(repo, name, cache_dir=self._access.cache_dir, token=self._access.token)


class _OpenMind:
    def __init__(self, access: Access) -> None:
        self._package = importlib.import_module("openmind_hub")
        self._access = access

    def files(self, repo: str) -> tuple[list[str], str | None]:
        return list(self._package.OmApi().list_repo_files(repo, token=self._access.token)), None

    def download(self, repo: str, name: str, version: str | None) -> str:
        return self._package.om_hub_download(
            repo, name, repo_type="dataset", token=self._access.token, cache_dir=self._access.cache_dir
        )


@dataclass(frozen=True)
class Hub:
    """A hub: its name, the name of its token, its client and what installs that."""

    title: str
    token: str
    client: Callable[[Access], Client]
    install: str


HUBS: dict[str, Hub] = {
    "hf_hub_url": Hub("the Hugging Face hub", "hf", _HuggingFace, "huggingface_hub"),
    "ms_hub_url": Hub("ModelScope", "ms", _ModelScope, "'shardyard[hubs]'"),
    "om_hub_url": Hub("the Modelers hub", "om", _OpenMind, "'shardyard[hubs]'"),
}
"""The hubs by the key that an entry names them with."""


class _NotReached(UserError):
    """The hub does not answer, or not with what was asked for."""


def fetch(key: str, repo: str, wanted: Wanted, access: Access, *, where: str) -> list[Path]:
    """Download the data files of one split of ``repo``, in the order of its card or of their names.

    Where the hub cannot be reached, the files of the last download of the same split are taken.

    Raises:
        UserError: the client is not installed, the hub or the repository cannot be reached, or has no such
            subset, split or folder, or no file of a type that is read.
    """
    client = _client(key, access, where)
    memo = _Memo(access, [key, repo, wanted.subset, wanted.split, wanted.folder])
    return memo.or_last(lambda: _fetch(client, key, repo, wanted, where), repo)


def fetch_file(key: str, repo: str, name: str, access: Access, *, where: str) -> Path:
    """Download one file of a data set repository.

    Raises:
        UserError: as ``fetch``.
    """
    client = _client(key, access, where)
    memo = _Memo(access, [key, repo, name])
    (file,) = memo.or_last(
        lambda: [Path(_ask(key, repo, where, lambda: client.download(repo, name, None)))], repo
    )
    return file


def _fetch(client: Client, key: str, repo: str, wanted: Wanted, where: str) -> list[Path]:
    listing, version = _ask(key, repo, where, lambda: client.files(repo))
    card = ""
    if _CARD in listing:
        path = Path(_ask(key, repo, where, lambda: client.download(repo, _CARD, version)))
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            card = stream.read(_LARGEST_CARD)
    chosen = choose_files(
        listing,
        card,
        subset=wanted.subset,
        split=wanted.split,
        folder=wanted.folder,
        where=f"{where}: {repo}",
    )
    _log.info("dataset %s: %d files of %s", repo, len(chosen), HUBS[key].title)
    return _ask(key, repo, where, lambda: _download_all(client, repo, chosen, version))


class _Memo:
    """Which files the last download of the same things gave, for a machine that has no network now."""

    def __init__(self, access: Access, things: list[str | None]) -> None:
        name = hashlib.sha256(json.dumps(things).encode()).hexdigest()[:32]
        folder = Path(access.cache_dir or "~/.cache/shardyard").expanduser().absolute()
        self._file = folder / "hub" / f"{name}.json"

    def or_last(self, download: Callable[[], list[Path]], repo: str) -> list[Path]:
        """The files that ``download`` gives, else those of the last time if all are still there."""
        try:
            files = download()
        except _NotReached as error:
            last = self._read()
            if not last or not all(file.is_file() for file in last):
                raise
            _log.warning("%s; its %d files of the last download are used", error, len(last))
            return last
        self._write(files)
        return files

    def _read(self) -> list[Path]:
        try:
            return [Path(name) for name in json.loads(self._file.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, files: list[Path]) -> None:
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:  # a read-only cache costs no more than the use without a network
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps([str(file.absolute()) for file in files]), encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            _log.debug("cannot write %s: %s", self._file, error)


def _download_all(client: Client, repo: str, names: list[str], version: str | None) -> list[Path]:
    pool = ThreadPoolExecutor(_DOWNLOADS_AT_ONCE)
    try:
        return [Path(path) for path in pool.map(lambda name: client.download(repo, name, version), names)]
    finally:
        pool.shutdown(cancel_futures=True)


def _client(key: str, access: Access, where: str) -> Client:
    hub = HUBS[key]
    try:
        return hub.client(access)
    except ImportError as error:
        raise UserError(f"{where}: needs the client of {hub.title}: pip install {hub.install}") from error


def _ask(key: str, repo: str, where: str, request: Callable[[], Any]) -> Any:
    try:
        return request()
    except Exception as error:  # each client raises errors of its own, of many kinds
        _log.debug("%s", repo, exc_info=True)
        raise _NotReached(
            f"{where}: {repo} cannot be fetched from {HUBS[key].title}: {one_line(error)}. Check the name, "
            f"the token and the network, or download its files and name them with file_name"
        ) from error
