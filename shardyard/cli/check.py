"""``shardyard check`` and ``shardyard schema``: look at a configuration without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from shardyard.cli.words import take_flag
from shardyard.config import Config, Loaded, layout_on, load_config, read_shape
from shardyard.config.explain import explain, find_key
from shardyard.config.layout_report import layout_lines
from shardyard.config.model_shape import config_file
from shardyard.config.resolved import format_table
from shardyard.config.schema import get
from shardyard.errors import UserError

CHECK_HELP = """\
usage: shardyard check FILE [overrides] [--world-size N] [--operators] [--explain KEY]

Validates a configuration and prints every value with its origin (default, file:line, command line).
  --world-size N  also shows how N ranks are arranged, or why they cannot be and which layouts could;
                  the sizes of the model count if its config.json is on this machine
  --operators     also shows which operators the model would run on this machine, from its config.json, or
                  why one that is asked for cannot run; takes some seconds
  --explain KEY   describes one setting instead; FILE may be left out
"""


def check(argv: Sequence[str]) -> int:
    """Validate the configuration of ``argv`` and print it.

    Raises:
        UserError: the configuration, or an option of this verb, is wrong.
    """
    words = list(argv)
    if {"-h", "--help"}.intersection(words):
        print(CHECK_HELP, end="")
        return 0
    key = _take_option(words, "--explain")
    world_size = _take_option(words, "--world-size")
    with_operators = take_flag(words, "--operators")
    if key is not None:
        path = find_key(key)
        print(explain(path))
        if words:
            loaded = load_config(words)
            print(f"  here: {get(loaded.config, path)!r} ({loaded.origins[path]})")
        return 0
    loaded = load_config(words)
    _check_template(loaded.config)
    _check_datasets(loaded.config)
    layout = _check_layout(loaded, world_size)
    operators = _operators(loaded.config) if with_operators else []
    print(format_table(loaded.config, loaded.origins))
    for warning in [*loaded.warnings, *_missing_paths(loaded.config)]:
        print(f"warning: {warning}")
    for line in [*layout, *operators]:
        print(line)
    print(f"{loaded.file or 'configuration'}: valid")
    return 0


def _check_template(config: Config) -> None:
    """Raise UserError for an unknown template or tool format, or a faulty template file."""
    name = config.data.template
    if name is not None and config.data.data_manager_type == "lf" and not name.endswith(".jinja"):
        from shardyard.data.templates.build import find_template  # no torch, but half a second

        find_template(name, config.data.tool_format)


def _check_datasets(config: Config) -> None:
    """Raise UserError for an entry of data.dataset or data.eval_dataset with a key or value that is none."""
    from shardyard.data.sources.registry import check_datasets  # no torch

    data = config.data
    for dataset in (data.dataset, data.eval_dataset):
        if data.data_manager_type == "lf":
            check_datasets(dataset, data.dataset_dir)


def _missing_paths(config: Config) -> list[str]:
    """Paths of the configuration that this machine does not have; the run may take place on another."""
    named = {
        "model.model_name_or_path": [config.model.model_name_or_path],
        "model.config_name_or_path": [config.model.config_name_or_path],
        "model.tokenizer_name_or_path": [config.model.tokenizer_name_or_path],
        "data.dataset": config.data.dataset_names,
        "training.resume_from_checkpoint": [config.training.resume_from_checkpoint],
    }
    return [
        f"{key}: {name} does not exist on this machine"
        for key, names in named.items()
        for name in names
        if name and _is_path(name) and not Path(name).expanduser().exists() and not glob(name)
    ]


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~"))


def schema(argv: Sequence[str]) -> int:
    """Print the JSON schema of the YAML file.

    Raises:
        UserError: ``argv`` is not empty.
    """
    if argv:
        raise UserError(f"shardyard schema takes no arguments, but got {argv[0]!r}")
    print(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
    return 0


def _take_option(words: list[str], name: str) -> str | None:
    """Remove ``name VALUE`` or ``name=VALUE`` from ``words`` and return the value; the last one wins."""
    value = None
    for index in reversed([i for i, word in enumerate(words) if word.split("=")[0] == name]):
        _, equals, text = words[index].partition("=")
        if not equals and index + 1 == len(words):
            raise UserError(f"{name} needs a value")
        found = text if equals else words[index + 1]
        del words[index : index + (1 if equals else 2)]
        value = found if value is None else value
    return value


def _operators(config: Config) -> list[str]:
    """The table of operators on this machine; raises UserError where one cannot be had."""
    _, unknown = read_shape(config.model)
    if unknown:
        raise UserError(f"--operators: {unknown}, and it says what a model is made of")
    from shardyard.device import detect_device  # torch and transformers, which nothing else here needs
    from shardyard.models.operators import operators_of
    from shardyard.ops.table import operator_lines

    device, (path, _) = detect_device(), config_file(config.model)
    rows = operator_lines(operators_of(config, path.parent, device))
    return [f"operators on this machine ({device.type}):", *(f"  {row}" for row in rows)]


def _check_layout(loaded: Loaded, world_size: str | None) -> list[str]:
    """What is said about the layout; raises UserError for one that does not fit."""
    _, unknown = read_shape(loaded.config.model)
    lines = [f"the layout is not checked against the model: {unknown}"] if unknown else []
    if world_size is None:
        layout_on(loaded, None)
        return lines
    if not world_size.isascii() or not world_size.isdigit() or len(world_size) > 9:
        raise UserError(f"--world-size: {world_size!r} is not a number of ranks")
    layout = layout_on(loaded, int(world_size))
    assert layout is not None
    return [*lines, *layout_lines(loaded.config, layout)]
