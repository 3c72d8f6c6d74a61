"""argv -> the frozen configuration of a run: defaults, then the YAML, then the command line.

Stages, in order: words -> nodes; both sources merged; references replaced; texts typed by their fields;
limits; rules. Faults of all stages are collected and raised as one error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardyard.config.command_line import parse_command_line
from shardyard.config.interpolation import interpolate
from shardyard.config.model_shape import read_shape
from shardyard.config.rules import Checked, Derived, apply_rules
from shardyard.config.schema import FIELDS, SECTIONS, Config
from shardyard.config.source import Fault, MapNode, Node, Notes, Place, Scalar
from shardyard.config.suggest import MOVED, suggest, suggest_section
from shardyard.config.values import kind_of, read_value
from shardyard.config.yaml_source import read_yaml
from shardyard.errors import UserError


class ConfigError(UserError):
    """Everything that is wrong with a configuration, one line each."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        lines = [str(fault) for fault in self.faults]
        head = f"{len(lines)} faults in the configuration:\n  "
        super().__init__(lines[0] if len(lines) == 1 else head + "\n  ".join(lines))


@dataclass(frozen=True)
class Origin:
    """Where a resolved value comes from."""

    kind: Literal["default", "file", "command line"]
    place: Place | None = None
    follows: str | None = None
    """The setting that a default followed, such as training.warmup_steps for warmup_ratio 0."""

    def __str__(self) -> str:
        if self.follows:
            return f"follows {self.follows}"
        if self.kind == "file" and self.place:
            return f"{self.place.file}:{self.place.line}"
        return self.kind


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it came about."""

    config: Config
    origins: dict[str, Origin] = field(repr=False)
    """``section.key`` of every field -> its origin."""
    warnings: list[str]
    file: Path | None


def load_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Loaded:
    """Resolve the words of a command line, without the program's and the verb's names.

    ``environ`` is what ``${NAME}`` reads; by default the process's environment.

    Raises:
        ConfigError: with every fault that was found.
        UserError: the YAML file cannot be read at all.
    """
    notes = Notes()
    if not argv:
        raise UserError("no configuration given; name a YAML file, then overrides like --training.lr 1e-5")
    words = parse_command_line(argv, notes)
    values: dict[str, Node] = {}
    if words.file is not None:
        values |= _keys_of_file(read_yaml(words.file, notes), notes)
    values |= _settle(words.overrides, {}, notes)
    if not words.file and not values and notes.faults:
        raise ConfigError(notes.faults)
    values = interpolate(values, os.environ if environ is None else environ, notes)
    typed = {path: read_value(node, kind_of(FIELDS[path]), path, notes) for path, node in values.items()}
    places = {path: node.place for path, node in values.items()}
    config = _validate(typed, places, words.file, notes)
    shape, _ = read_shape(config.model)
    derived = apply_rules(Checked(config, places, notes, shape))
    if notes.faults:
        raise ConfigError(sorted(notes.faults, key=_reading_order))
    return Loaded(
        config=_with_derived(config, derived),
        origins={path: _origin(path, places, derived) for path in FIELDS},
        warnings=notes.warnings,
        file=Path(words.file) if words.file else None,
    )


def _keys_of_file(root: MapNode, notes: Notes) -> dict[str, Node]:
    """``section.key`` -> node; what stands where no key can be is a fault."""
    found: dict[str, Node] = {}
    keys: dict[str, Place] = {}
    for section in root.entries:
        if section.key in FIELDS:
            name, key = section.key.split(".")
            notes.fault(
                section.place, section.key, f"a key stands in its section: write `{key}` under `{name}:`"
            )
        elif section.key not in SECTIONS:
            word = "section" if isinstance(section.value, MapNode) else "key"
            notes.fault(section.place, section.key, f"unknown {word}{suggest_section(section.key)}")
        elif isinstance(section.value, MapNode):
            for entry in section.value.entries:
                found[f"{section.key}.{entry.key}"] = _at_key(entry.value, entry.place)
                keys[f"{section.key}.{entry.key}"] = entry.place
        elif not (isinstance(section.value, Scalar) and section.value.is_null):
            notes.fault(
                section.place, section.key, "a section must be a mapping, with indented keys below it"
            )
    return _settle(found, keys, notes)


def _at_key(node: Node, place: Place) -> Node:
    """Block values begin a line or more below their key; faults are shown at the key then."""
    if isinstance(node, Scalar) or node.place.line == place.line:
        return node
    return MapNode(node.entries, place) if isinstance(node, MapNode) else type(node)(node.items, place)


def _settle(found: Mapping[str, Node], keys: Mapping[str, Place], notes: Notes) -> dict[str, Node]:
    """Move the keys that may stand in another section to their own, and refuse unknown ones."""
    settled: dict[str, Node] = {path: node for path, node in found.items() if path in FIELDS}
    for path, node in found.items():
        home = MOVED.get(path.rpartition(".")[2])
        place = keys.get(path, node.place)
        if path in FIELDS:
            continue
        if home is None:
            notes.fault(place, path, f"unknown key{suggest(path)}")
        elif home in settled:
            notes.fault(place, path, f"{home} is set too; keep that one")
        else:
            notes.warn(place, path, f"belongs to another section; read as {home}")
            settled[home] = node
    return settled


def _validate(typed: dict[str, Any], places: Mapping[str, Place], file: str | None, notes: Notes) -> Config:
    """The Config of all sound values; unsound ones become faults and are left at their defaults."""
    faulty = notes.faulty_paths()
    sound = {path: value for path, value in typed.items() if path not in faulty}
    try:
        return Config.model_validate(_nested(sound))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path = ".".join(map(str, item["loc"][:2]))
            if item["type"] == "missing":
                continue
            sound.pop(path, None)
            shown = path + "".join(f"[{part}]" for part in item["loc"][2:] if isinstance(part, int))
            notes.fault(places[path], shown, _limit_message(item))
    for path, info in FIELDS.items():
        if info.is_required() and path not in sound:
            if path not in notes.faulty_paths():
                notes.fault(
                    Place(file), path, f"required, but not set; give --{path} VALUE or write it in the YAML"
                )
            sound[path] = "missing"
    return Config.model_validate(_nested(sound))


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, value in flat.items():
        section, key = path.split(".")
        nested[section][key] = value
    return nested


_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def _limit_message(item: Any) -> str:
    name, words = _LIMITS.get(item["type"], ("", ""))
    if not name:
        return f"{item['input']!r}: {item['msg']}"
    return f"{item['input']} is out of range; it must be {words} {item['ctx'][name]:g}"


def _with_derived(config: Config, derived: Mapping[str, Derived]) -> Config:
    for path, value in derived.items():
        section, key = path.split(".")
        changed = getattr(config, section).model_copy(update={key: value.value})
        config = config.model_copy(update={section: changed})
    return config


def _origin(path: str, places: Mapping[str, Place], derived: Mapping[str, Derived]) -> Origin:
    if path in derived:
        return Origin("default", follows=derived[path].source)
    place = places.get(path)
    if place is None:
        return Origin("default")
    return Origin("command line") if place.file is None else Origin("file", place)


def _reading_order(fault: Fault) -> tuple[bool, int, int]:
    return (fault.place.file is None, fault.place.line, fault.place.column)
