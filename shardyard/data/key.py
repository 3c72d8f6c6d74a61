"""What tokenised samples depend on, as a key: the same key means the same bytes, whatever the run's other
settings are.

Only settings that cannot change a token are left out, by name: a new setting is part of the key until someone
has thought about it, since a key that is too narrow trains on stale tokens without a word.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardyard.config import Config
from shardyard.data.sources import DatasetEntry
from shardyard.data.templates.build import find_template
from shardyard.data.templates.spec import read_text
from shardyard.errors import UserError

CODE_VERSION = 3
"""Raise it whenever the same input and settings give other samples than before."""

_CHANGE_NO_TOKEN = frozenset(
    {
        "dataset",  # the entries and the contents of their files stand for these two
        "dataset_dir",
        "eval_dataset",
        "val_size",
        "split",
        "overwrite_cache",
        "preprocessing_batch_size",
        "preprocessing_num_workers",
        "tokenized_path",
        "data_shared_file_system",
        "no_shared_storage",
        "create_attention_mask_in_dataloader",
        "eval_num_beams",
        "eval_on_each_dataset",
        "streaming",
        "buffer_size",
        "dataloader_type",
        "data_manager_type",
        "mix_strategy",  # from here on: how samples are chosen, ordered and joined, after they are made
        "interleave_probs",
        "packing",
        "neat_packing",
        "cross_document_attention",
        "append_eod",  # from here on: of token streams
        "reset_attention_mask",
        "index_compat",
    }
)
"""Settings of ``data`` that leave the samples of conversations as they are."""

_CHANGE_DOCUMENTS = ("append_eod", "max_samples", "on_bad_row")
"""The only settings of ``data`` that tokenised documents depend on: windows are cut when they are read."""

_MEMO_FROM = 16 * 2**20
"""Bytes from which a file's hash is remembered; smaller ones are read again each time."""

_SETTLED = 2.0
"""Seconds since a file's last change after which its time stamps can be trusted to tell a change."""


_TOLD = bool | int | float | str | None
"""Values that a message shows; of others it says that they changed."""


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """A file's content hash and its number of line ends."""

    sha256: str
    newlines: int


class FileHasher:
    """Hashes files; ``memo``, a JSON file, remembers large ones by path, size, inode, mtime and ctime."""

    def __init__(self, memo: Path) -> None:
        self._path = memo
        self._memo: dict[str, list[Any]] = {}
        try:
            known = json.loads(memo.read_text(encoding="utf-8"))
            self._memo = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            pass

    def facts(self, file: Path) -> FileFacts:
        """Raises UserError if the file cannot be read."""
        try:
            state = file.stat()
            stamp = [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
            name = os.path.abspath(file)
            known = self._memo.get(name)
            if isinstance(known, list) and known[:4] == stamp and len(known) == 6:
                return FileFacts(str(known[4]), int(known[5]))
            facts = _read_facts(file)
        except OSError as error:
            raise UserError(f"data.dataset: cannot read {file}: {error.strerror or error}") from error
        if state.st_size >= _MEMO_FROM and time.time() - state.st_ctime > _SETTLED:
            self._memo[name] = [*stamp, facts.sha256, facts.newlines]
            self._save()
        return facts

    def _save(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:  # a memo that cannot be kept costs time only
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._memo), encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)


def sample_parts(
    config: Config, entry: DatasetEntry, tokenizer: Any, facts: Mapping[Path, FileFacts]
) -> dict[str, Any]:
    """All that the samples of an entry's conversations depend on, under names that a message can show.

    ``facts`` hold every file of ``entry``.
    """
    values = config.data.model_dump(mode="json")
    settings = {f"data.{name}": value for name, value in values.items() if name not in _CHANGE_NO_TOKEN}
    content = template_content(config.data.template, config.data.tool_format)
    if content is not None:
        settings["the template's content"] = _sha(content)
    return _parts("samples", config, settings, entry, tokenizer_parts(tokenizer), facts)


def template_content(template: str | None, tool_format: str | None = None) -> str | None:
    """What the template that ``data.template`` names says, of this package or a file; None if it names none.

    Raises:
        UserError: an unknown name, or a wrong file.
    """
    if template is None:
        return None
    if template.endswith(".jinja"):
        return read_text(Path(template).expanduser())
    spec, tools = find_template(template, tool_format)
    return spec.model_dump_json() + (tools.model_dump_json() if tools else "")


def document_parts(
    config: Config, entry: DatasetEntry, tokenizer: Any, facts: Mapping[Path, FileFacts]
) -> dict[str, Any]:
    """All that an entry's tokenised documents depend on."""
    settings = {f"data.{name}": getattr(config.data, name) for name in _CHANGE_DOCUMENTS}
    content = tokenizer_parts(tokenizer)
    del content["tokenizer's chat template"]
    return _parts("documents", config, settings, entry, content, facts)


def _parts(
    kind: str,
    config: Config,
    settings: Mapping[str, Any],
    entry: DatasetEntry,
    tokenizer: Mapping[str, Any],
    facts: Mapping[Path, FileFacts],
) -> dict[str, Any]:
    described = {f"dataset: {name}": value for name, value in _describe(entry, facts).items()}
    parts = {
        "code version": CODE_VERSION,
        "kind": kind,
        "model.split_special_tokens": config.model.split_special_tokens,
        **settings,
        **described,
        **tokenizer,
    }
    # as it will be read back, so that the two compare equal
    return json.loads(json.dumps(parts, default=str))


def quick_facts(file: Path) -> FileFacts:
    """A hash of a file's size, first and last MiB: of a stream nobody wants to read the whole file first.

    Raises UserError if the file cannot be read.
    """
    sha = hashlib.sha256()
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            sha.update(str(size).encode() + stream.read(2**20))
            stream.seek(max(size - 2**20, 0))
            sha.update(stream.read(2**20))
    except OSError as error:
        raise UserError(f"data.dataset: cannot read {file}: {error.strerror or error}") from error
    return FileFacts(sha.hexdigest(), newlines=0)


def indexed_key(idx: Path, bin_size: int) -> str:
    """The key of token files that are there already: their index, and how long the tokens are.

    The tokens themselves are not hashed: they may be terabytes.
    """
    return _sha([_read_facts(idx).sha256, bin_size])


def tokenizer_parts(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer's content: its whole serialised form where it has one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for state in ("padding", "truncation"):  # left behind by the last call; not content
            content.pop(state, None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    template = getattr(tokenizer, "chat_template", None)
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    adds = [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")]
    return {
        "tokenizer": _sha(content),
        "tokenizer's special tokens": _sha([special, adds]),
        "tokenizer's chat template": _sha(template),
    }


def digest(parts: Mapping[str, Any]) -> str:
    """The key of these parts: 32 hex digits."""
    return _sha(dict(parts))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, in words: ``data.cutoff_len was 512, is 1024``."""
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        told = isinstance(before, _TOLD) and isinstance(after, _TOLD) and not name.startswith("tokenizer")
        found.append(f"{name} was {before!r}, is {after!r}" if told else f"{name} changed")
    return found


def identity(config: Config, kind: str, name: str) -> str:
    """Names a data set whatever the settings: what was built last for it tells why it is built again."""
    return _sha([kind, name, os.path.abspath(config.data.dataset_dir)])


def _describe(entry: DatasetEntry, facts: Mapping[Path, FileFacts]) -> dict[str, Any]:
    described = dataclasses.asdict(entry)
    del described["name"], described["files"]
    contents = [[file.suffix, facts[file].sha256] for file in entry.files]
    return {**described, "contents of its files": contents}


def _read_facts(file: Path) -> FileFacts:
    sha, newlines = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(4 * 2**20):
            sha.update(chunk)
            newlines += chunk.count(b"\n")
    return FileFacts(sha.hexdigest(), newlines)


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
