"""``shardyard preprocess``: raw rows to Megatron's indexed data sets; ``merge`` and ``inspect`` them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.cli.preprocess_options import TRAINING_MIXES, Parser, count, parse, preprocess_parser
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.data.preprocess import Job
    from shardyard.data.preprocess.handlers import Handler
    from shardyard.data.sources import DatasetEntry


def preprocess(argv: Sequence[str]) -> int:
    """Run the verb.

    Raises:
        UserError: a wrong option or input, or files that cannot be written.
    """
    words = list(argv)
    try:
        if words[:1] == ["merge"]:
            return _merge(words[1:])
        if words[:1] == ["inspect"]:
            return _inspect(words[1:])
        options = parse(preprocess_parser(), words)
    except SystemExit:  # argparse has printed the help
        return 0
    return _merge_groups(options) if options.merge_group_keys else _run(options)


def _run(options: argparse.Namespace) -> int:
    from shardyard.data.preprocess.handlers import find_handler

    handler = find_handler(options.handler_name)
    _check(options, handler)
    prefix = _prefix(options.output_prefix)
    entries = _entries(options, handler)
    tokenizer = _tokenizer(options)

    from shardyard.data.preprocess import run_job
    from shardyard.data.preprocess.outcome import report_lines
    from shardyard.monitor import setup_logging

    setup_logging(0)
    try:
        result = run_job(_job(options, handler, entries, prefix), tokenizer)
    except UserError as error:
        raise UserError(_own_words(str(error))) from error
    except KeyboardInterrupt:
        print(f"the finished work is kept in {prefix}.partial; the same command goes on from there")
        raise
    if result.already_there:
        print(f"already there, made from the same input with the same options: {prefix}")
    for name, counts in result.counts.items():
        print(f"{name}:")
        print(_own_words("\n".join(report_lines(counts))))
    for written in result.prefixes:
        print(f"{written}.bin, .idx")
    return 0


def _job(options: argparse.Namespace, handler: Handler, entries: Sequence[DatasetEntry], prefix: Path) -> Job:
    from shardyard.data.preprocess import Job
    from shardyard.data.preprocess.run import Pace

    pairs = {entry.ranking for entry in entries}
    if len(pairs) > 1:
        raise UserError("--datasets: preference pairs and other rows need an output each")
    job = Job(
        kind="pairs" if pairs == {True} else handler.kind,
        entries=entries,
        prefix=prefix,
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
        template=_template(options),
        enable_thinking={"true": True, "false": False, "none": None}[options.enable_thinking],
        seq_length=options.seq_length,
        pack=options.pack,
        pad_to_multiple_of=options.pad_to_multiple_of,
        max_samples=options.max_samples,
        on_bad_row=options.on_bad_row,
        pace=Pace(max(options.workers, options.n_subs), log_every_documents=options.log_interval),
        save_every=options.save_interval,
        overwrite=options.overwrite_cache,
    )
    if options.cache_dir is None:
        return job
    return replace(job, memo=Path(options.cache_dir).expanduser() / "files.json")


def _check(options: argparse.Namespace, handler: Handler) -> None:
    """Refuse options that do not go together."""
    is_text = handler.kind == "text"
    given = {
        "--prompt-type": options.prompt_type,
        "--prompt-type-path": options.prompt_type_path,
        "--map-keys": options.map_keys,
    }
    for name, value in given.items():
        if is_text and value is not None:
            raise UserError(f"{name}: plain text has no template and one column; name it with --json-keys")
    if not is_text and options.json_keys != ["text"]:
        raise UserError("--json-keys: conversations name their columns with --map-keys")
    if handler.kind in ("text", "document") and (options.seq_length or options.pack):
        raise UserError(
            "--seq-length: documents are neither cut nor dropped here, training cuts them into windows of "
            "data.cutoff_len; leave it out, and --pack too"
        )
    if handler.kind in ("sft", "pairs") and options.append_eod:
        raise UserError("--append-eod: the template ends replies; it is for pretraining text")
    if options.pack and (not options.seq_length or handler.kind == "pairs"):
        raise UserError("--pack: fills sequences of --seq-length tokens with samples; give it, for no pairs")
    if options.neat_pack and not options.pack:
        raise UserError("--neat-pack: needs --pack")
    if options.pad_to_multiple_of > 1 and (options.seq_length or 0) % options.pad_to_multiple_of:
        raise UserError("--pad-to-multiple-of: --seq-length must be a multiple of it")
    if options.pad_to_multiple_of > 1 and handler.kind != "sft":
        raise UserError("--pad-to-multiple-of: only packed samples are padded; leave it out")
    if options.mix_strategy != "concat":
        raise UserError(f"--mix-strategy {options.mix_strategy}: {TRAINING_MIXES}")


def _entries(options: argparse.Namespace, handler: Handler) -> list[DatasetEntry]:
    from shardyard.data.sources import resolve_datasets

    try:
        if handler.formatting is None:
            names = [name for part in options.datasets or options.input for name in part.split(",") if name]
            if not options.dataset_dir:
                raise UserError("--dataset-dir: name the folder of dataset_info.json")
            return resolve_datasets(names, options.dataset_dir)
        if options.datasets or options.dataset_dir:
            raise UserError(
                "--datasets, --dataset-dir: go with --handler-name LlamaFactoryInstructionHandler"
            )
        described = _described(options, handler)
        return resolve_datasets([{"file_name": path, **described} for path in _paths(options.input)], ".")
    except UserError as error:
        raise UserError(_own_words(str(error))) from error


def _described(options: argparse.Namespace, handler: Handler) -> dict[str, Any]:
    """The inline entry that a handler and ``--map-keys`` mean, without its files."""
    mapping: dict[str, Any] = {}
    if options.map_keys is not None:
        try:
            mapping = json.loads(options.map_keys)
        except ValueError as error:
            raise UserError(f"--map-keys: not valid JSON: {error}") from error
        if not isinstance(mapping, dict):
            raise UserError("--map-keys: must be a JSON object of names")
    described: dict[str, Any] = {"formatting": handler.formatting}
    if (tags := mapping.pop("tags", None)) is not None:
        described["tags"] = tags
    columns = {key: value or None for key, value in mapping.items()}
    if handler.kind == "pairs":
        described["ranking"] = True
        columns = {"chosen": "chosen", "rejected": "rejected", **columns}
    if columns:
        described["columns"] = columns
    return described


def _paths(inputs: Sequence[str]) -> list[str]:
    """The paths of ``--input``: several words, or one with commas as the reference has it."""
    if not inputs:
        raise UserError("--input: name the files, folders or globs to read")
    paths: list[str] = []
    for word in inputs:
        paths += [word] if Path(word).exists() else [part for part in word.split(",") if part]
    return paths


def _prefix(text: str | None) -> Path:
    if not text:
        raise UserError("--output-prefix: name the output files up to their suffixes, as out/my_data")
    prefix = Path(text).expanduser()
    if text.endswith("/") or prefix.is_dir():
        raise UserError(
            f"--output-prefix: {text} is a folder; give the name of the files too, as {prefix}/data"
        )
    return prefix


def _template(options: argparse.Namespace) -> str | None:
    if options.prompt_type_path is not None:
        if options.prompt_type is not None:
            raise UserError("--prompt-type, --prompt-type-path: give one of them")
        if not options.prompt_type_path.endswith((".yaml", ".yml", ".jinja")):
            raise UserError(
                f"--prompt-type-path: {options.prompt_type_path}: a template file is .yaml or .jinja "
                "(docs/templates.md); the reference's templates.json is not read"
            )
        return options.prompt_type_path
    other_names = {"trl": None, "gpt_oss": "gpt", "qwen_lf": "qwen2.5"}
    return other_names.get(options.prompt_type, options.prompt_type)


def _tokenizer(options: argparse.Namespace) -> Any:
    from shardyard.config.sections.model import ModelConfig
    from shardyard.data.tokenizer import load_tokenizer

    name = options.tokenizer_name_or_path
    if not name:
        raise UserError("--tokenizer-name-or-path: name the folder of the tokenizer")
    model = ModelConfig(
        model_name_or_path=name,
        use_fast_tokenizer=not options.tokenizer_not_use_fast,
        trust_remote_code=options.trust_remote_code,
    )
    try:
        return load_tokenizer(model)
    except UserError as error:
        raise UserError(str(error).replace("model.model_name_or_path", "--tokenizer-name-or-path")) from error


def _own_words(message: str) -> str:
    """A message of the data room, which speaks of the YAML file's keys, with this command's options."""
    names = {
        "data.dataset_dir": "--dataset-dir",
        "data.dataset.file_name": "--input",
        "data.dataset": "--input",
        "data.template": "--prompt-type",
        "data.max_samples": "--max-samples",
        "data.cutoff_len": "--seq-length",
    }
    for key, option in names.items():
        message = message.replace(key, option)
    return message


def _merge_groups(options: argparse.Namespace) -> int:
    from shardyard.data.preprocess.merging import groups_of, merge_outputs

    if len(options.input) != 1:
        raise UserError("--merge-group-keys: --input names the folder of the .bin and .idx files")
    prefix = _prefix(options.output_prefix)
    groups = groups_of(Path(options.input[0]).expanduser(), options.merge_group_keys)
    for key, prefixes in groups.items():
        out = prefix.with_name(f"{prefix.name}_{key}")
        _tell_merged(prefixes, merge_outputs(prefixes, out, overwrite=options.overwrite_cache))
    return 0


def _merge(words: list[str]) -> int:
    from shardyard.data.preprocess.merging import merge_outputs

    parser = Parser(prog="shardyard preprocess merge", allow_abbrev=False, description="Join data sets.")
    parser.add_argument("--input", nargs="+", default=[], metavar="PREFIX", help="in this order")
    parser.add_argument("--output-prefix", metavar="PREFIX")
    parser.add_argument("--overwrite-cache", action="store_true", help="replace an output that is there")
    options = parse(parser, words)
    prefixes = [Path(word).expanduser() for word in options.input]
    out = _prefix(options.output_prefix)
    _tell_merged(prefixes, merge_outputs(prefixes, out, overwrite=options.overwrite_cache))
    return 0


def _tell_merged(prefixes: Sequence[Path], written: Sequence[Path]) -> None:
    for prefix in written:
        print(f"{prefix}.bin, .idx: {len(prefixes)} data sets")


def _inspect(words: list[str]) -> int:
    from shardyard.data.indexed.summary import inspect
    from shardyard.data.preprocess.packed import token_files

    parser = Parser(prog="shardyard preprocess inspect", allow_abbrev=False, description="Show a data set.")
    parser.add_argument("prefix", help="path of the .bin and .idx files without their suffixes")
    parser.add_argument("--tokenizer-name-or-path", "--tokenizer", help="decodes the first documents")
    parser.add_argument("--documents", type=count, default=3, help="documents that are shown")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parse(parser, words)
    options.tokenizer_not_use_fast = options.trust_remote_code = False
    decode = None
    if options.tokenizer_name_or_path:
        decode = _tokenizer(options).decode
    prefix = token_files(Path(options.prefix).expanduser())
    summary = inspect(prefix, decode, num_heads=options.documents)
    print(json.dumps(summary.to_json(), ensure_ascii=False) if options.json else summary.to_text())
    return 0
