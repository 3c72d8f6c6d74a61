"""Which files of a data set repository hold a subset's split: what its card says, else what names say.

The rules are those of the package ``datasets`` (its documentation, "Structure your repository" and "Manual
configuration"): the card's ``configs`` give patterns by split; without them, shards as
``data/train-00000-of-00002.parquet``, then folders named after a split, then files named after one, then all
files as ``train``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from shardyard.data.sources.files import file_type
from shardyard.errors import UserError

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"data/(?P<split>\w+)-\d{5}-of-\d{5}[^/]*")
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def choose_files(
    listing: Iterable[str], card: str, *, subset: str | None, split: str, folder: str | None, where: str
) -> list[str]:
    """The data files of a split, sorted within each pattern. ``card`` is the text of README.md.

    ``folder`` limits the choice to what lies under it, by names alone.

    Raises:
        UserError: no such subset, split or folder, or no file of a type that is read.
    """
    files = sorted(name for name in listing if _is_data(name))
    if not files:
        raise UserError(f"{where}: the repository has no file of a type that is read; scripts are not run")
    configs = _configs(card, where)
    root = (folder or "").strip("/")
    config: Mapping[str, Any] = {}
    if subset is not None or (configs and not root):
        config = _config(configs, files, subset, root, where)
        root = "/".join(part for part in (root, str(config.get("data_dir") or "").strip("./")) if part)
    inside = [name for name in files if _under(name, root)]
    if not inside:
        raise UserError(f"{where}: no data file under {root}/; there are {_some(files)}")
    if config.get("data_files"):
        splits = _splits_of_card(config["data_files"], root, inside, where)
    else:
        splits = _splits_by_name(inside, root)
    if not splits.get(split):
        raise UserError(f"{where}: no split {split!r}; found {', '.join(splits) or 'none'}")
    return splits[split]


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return bool(file_type(path)) and not hidden and path.name not in _NO_DATA and ".." not in path.parts


def _under(name: str, root: str) -> bool:
    return not root or name.startswith(root + "/")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _configs(card: str, where: str) -> list[Mapping[str, Any]]:
    """The ``configs`` in the card's front matter, YAML between two lines of three dashes."""
    matter = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\n---[ \t]*(?:\r?\n|$)", card, re.DOTALL)
    if matter is None:
        return []
    try:
        head = yaml.safe_load(matter.group(1))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{where}: the front matter of its README.md is not valid YAML") from error
    configs = head.get("configs") if isinstance(head, dict) else None
    return [item for item in configs if isinstance(item, dict)] if isinstance(configs, list) else []


def _config(
    configs: Sequence[Mapping[str, Any]], files: Sequence[str], subset: str | None, root: str, where: str
) -> Mapping[str, Any]:
    """The card's config of a subset; without a card that lists any, the folder of its name."""
    names = {str(config.get("config_name", "default")): config for config in configs}
    if subset in names:
        return names[subset]
    if subset is None:
        marked = [config for config in configs if config.get("default") is True]
        if marked or "default" in names or len(names) == 1:
            return marked[0] if marked else names.get("default") or next(iter(names.values()))
        raise UserError(f"{where}: has several subsets; set subset to one of {', '.join(names)}")
    under = f"{root}/{subset}" if root else subset
    if not names and any(_under(name, under) for name in files):
        return {"data_dir": subset}
    found = f"found {', '.join(names)}" if names else "the card lists none, and no folder has that name"
    raise UserError(f"{where}: no subset {subset!r}; {found}")


def _splits_of_card(given: Any, root: str, files: Sequence[str], where: str) -> dict[str, list[str]]:
    """``data_files`` as a pattern, a list of patterns, or a list of {split, path}."""
    by_split: dict[str, list[str]] = {}
    for item in given if isinstance(given, list) else [given]:
        pair = item if isinstance(item, dict) else {"split": "train", "path": item}
        paths = pair.get("path")
        patterns = by_split.setdefault(str(pair.get("split")), [])
        patterns += [str(path) for path in (paths if isinstance(paths, list) else [paths])]
    splits: dict[str, list[str]] = {}
    for split, patterns in by_split.items():
        chosen: list[str] = []
        for pattern in patterns:
            matches = _pattern(f"{root}/{pattern}" if root else pattern)
            chosen += [name for name in files if matches.fullmatch(name) and name not in chosen]
        splits[split] = chosen
    if not any(splits.values()):
        raise UserError(f"{where}: no data file fits the patterns of its README.md; there are {_some(files)}")
    return splits


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob in which ``*`` stays within a folder and ``**`` does not; a folder stands for all below it."""
    glob = re.sub(r"^(\./)+", "", glob).rstrip("/")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", glob)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            expression += re.escape(part)
        else:
            expression += known.get(part) or "[" + part[1:-1].replace("\\", r"\\").replace("!", "^", 1) + "]"
    return re.compile(f"(?:{expression})(?:/.*)?")


def _splits_by_name(files: Sequence[str], root: str) -> dict[str, list[str]]:
    """The splits that names tell; the first rule that finds any is the one."""
    inner = {name: name[len(root) + 1 :] if root else name for name in files}
    shards: dict[str, list[str]] = {}
    for name in files:
        shard = _SHARD.fullmatch(inner[name])
        if shard:
            shards.setdefault(shard["split"], []).append(name)
    if shards:
        return shards
    for of in (lambda path: path.parent.as_posix(), lambda path: path.name):
        splits = {
            split: [name for name in files if _says(of(PurePosixPath(inner[name])), words)]
            for split, words in _WORDS.items()
        }
        if any(splits.values()):
            return {split: names for split, names in splits.items() if names}
    return {"train": list(files)}


def _says(name: str, words: Iterable[str]) -> bool:
    """Whether a path has one of the words, set apart by what is no letter."""
    return any(re.search(rf"(?:^|[-._ 0-9/]){word}(?:$|[-._ 0-9/])", name) for word in words)
