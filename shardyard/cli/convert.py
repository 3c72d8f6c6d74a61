"""``shardyard convert``: weights between Hugging Face, DCP and Megatron-core folders, every direction."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.cli.convert_options import DTYPES, convert_parser, parse
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.convert.job import Conversion, Outcome
    from shardyard.convert.mcore import Given, McoreLayout

_LAYOUT = {
    "tp": "tp", "pp": "pp", "ep": "ep", "expert_tp": "expert_tp", "vpp": "vpp",
    "num_layer_list": "num_layer_list", "noop_layers": "noop_layers", "moe_grouped_gemm": "grouped",
    "moe_tp_extend_ep": "moe_tp_extend_ep", "transformer_impl": "implementation",
    "schedules_method": "schedules_method", "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
    "mtp_num_layers": "mtp_layers", "mla_mm_split": "mla_mm_split", "dialect": "dialect",
}  # fmt: skip
"""Option -> field of the layout."""
_GIVEN = ("noop_layers", "num_layer_list", "expert_tp", "moe_tp_extend_ep", "schedules_method")
"""What may be said of a Megatron-core folder that is read."""


def convert(argv: Sequence[str]) -> int:
    """Run the verb, also under the names of the reference's two scripts.

    Raises:
        UserError: a wrong option, or what cannot be converted.
    """
    words = list(argv)
    names: Mapping[str, str] = {}
    try:
        if words[:1] and words[0] in ("convert_ckpt_v2.py", "merge_dcp_to_hf.py"):
            from shardyard.cli.convert_reference import OWN_WORDS, reference_conversion

            names = OWN_WORDS[words[0]]
            return run(reference_conversion(words[0], words[1:]))
        return run(conversion_of(parse(convert_parser(), words)))
    except UserError as error:
        raise UserError(_own_words(str(error), names)) from error
    except SystemExit:  # argparse has printed the help
        return 0


def _own_words(message: str, names: Mapping[str, str]) -> str:
    """A message that names fields of the layout, or options of the verb, as they were typed."""
    fields = "|".join(field for field in _LAYOUT.values() if "_" in field)
    message = re.sub(rf"(?<![\w/.-])({fields})\b", lambda found: _spelt(found[0]), message)
    return re.sub(r"(?<![\w-])--[a-z-]+", lambda found: names.get(found[0], found[0]), message)


def run(job: Conversion) -> int:
    """Convert and tell what came of it."""
    from transformers.utils import logging as transformers_logging

    from shardyard.convert.job import convert as convert_now
    from shardyard.monitor import setup_logging

    setup_logging(0)
    transformers_logging.set_verbosity_error()
    try:
        outcome = convert_now(job)
    except KeyboardInterrupt:
        print(f"finished files are kept in {job.target}; the same command goes on from there")
        raise
    for line in _lines(job, outcome):
        print(line)
    return 0


def conversion_of(options: argparse.Namespace) -> Conversion:
    """The typed form of the verb's options.

    Raises:
        UserError: options that do not go together.
    """
    if options.to is None:
        raise UserError("--to: say what the result is to be: hf, dcp or mcore")
    from shardyard.convert.formats import form_of

    source = Path(options.source).expanduser()
    form = form_of(source, options.form)
    if options.to == "mcore" and options.shard_size is not None:
        raise UserError("--shard-size: the files of a Megatron-core folder are those of its ranks")
    layout, given = mcore_options(options, form, options.to)
    return make_conversion(
        source, options.target, options.to, form=form, config=options.config, dtype=options.dtype,
        shard_bytes=options.shard_size, workers=options.workers, check=options.verify, layout=layout,
        given=given, model_type=options.model_type,
    )  # fmt: skip


def make_conversion(
    source: Path,
    target: str,
    to: Any,
    *,
    form: Any,
    config: str | None,
    dtype: str | None,
    shard_bytes: int | None,
    **other: Any,
) -> Conversion:
    """A `Conversion` of options as they are typed."""
    import torch

    from shardyard.convert.job import Conversion

    config_dir = Path(config).expanduser() if config else None
    if config_dir is not None and not (config_dir / "config.json").is_file():
        raise UserError(f"--config {config}: there is no config.json in that folder")
    if shard_bytes is not None:
        other["shard_bytes"] = shard_bytes
    return Conversion(
        source,
        Path(target).expanduser(),
        to,
        form=form,
        config_dir=config_dir,
        dtype=getattr(torch, DTYPES[dtype]) if dtype in DTYPES else None,
        keep_dtype=dtype == "keep",
        **other,
    )


def mcore_options(options: argparse.Namespace, form: str, to: str) -> tuple[McoreLayout, Given]:
    """The layout to write, and what is said of the folder that is read.

    Raises:
        UserError: an option that would have no effect.
    """
    from shardyard.convert.mcore import Given, McoreLayout, parse_list

    typed = {name: getattr(options, name) for name in _LAYOUT}
    for name in ("num_layer_list", "noop_layers"):
        typed[name] = parse_list(typed[name], _spelt(name)) or None if typed[name] else None
    stated = {name: value for name, value in typed.items() if value is not None and value is not False}
    if to == "mcore":
        return McoreLayout(**{_LAYOUT[name]: value for name, value in stated.items()}), Given()
    if form != "mcore":
        if stated or options.model_type:
            name = next(iter(stated), "model_type")
            raise UserError(f"{_spelt(name)}: neither side is a Megatron-core folder; leave it out")
        return McoreLayout(), Given()
    for name in stated:
        if name not in _GIVEN:
            raise UserError(f"{_spelt(name)}: a Megatron-core folder says this itself; leave it out")
    if stated.get("expert_tp", 1) != 1:
        raise UserError("--expert-tp: of a folder that is read only 1 has to be said")
    return McoreLayout(), Given(**stated)


def _spelt(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _lines(job: Conversion, outcome: Outcome) -> list[str]:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in outcome.dtypes)
    lines = [
        f"{job.target}: {outcome.tensors} tensors, {outcome.bytes / 2**20:,.1f} MiB, {dtypes}",
    ]
    if outcome.left_out:
        first = min(outcome.left_out)
        lines.append(
            f"left out: {len(outcome.left_out)} tensors that this form has no place for, such as {first}"
        )
    if outcome.verified is not None:
        lines.append(f"verified: {outcome.verified}")
    if job.to == "dcp" and dtypes != "float32":
        lines.append(
            "to start from it: model.model_name_or_path; for training.resume_from_checkpoint convert with "
            "--dtype fp32"
        )
    return lines
