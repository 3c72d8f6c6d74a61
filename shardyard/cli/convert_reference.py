"""The reference's two scripts, ``convert_ckpt_v2.py`` and ``merge_dcp_to_hf.py``, with their own options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardyard.cli.convert import make_conversion, mcore_options
from shardyard.cli.convert_options import DTYPES, Parser, byte_count, count, parse
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.convert.job import Conversion

_LORA = "adapters are not converted here yet; merge them into the model first"
_MAMBA = "Mamba models are not converted here yet"
_REFUSED = {
    **dict.fromkeys(
        ("--lora-load", "--lora-r", "--lora-alpha", "--lora-target-modules", "--save-lora-to-hf"), _LORA
    ),
    **dict.fromkeys(
        ("--mamba-d-model", "--mamba-state-dim", "--mamba2-n-groups", "--mamba-head-dim"), _MAMBA
    ),
    "--num-layers": "all layers are converted; for a smaller model train one with model.config_overrides",
}
"""Options of the reference that would have no effect or no meaning here, and why."""
OWN_WORDS = {
    "merge_dcp_to_hf.py": {"--config": "--model-configs", "--from": "--load-dir"},
    "convert_ckpt_v2.py": {
        "--config": "--hf-cfg-dir",
        "--from": "--load-model-type",
        "--to": "--save-model-type",
        "--expert-tp": "--expert-tensor-parallel-size",
        "--vpp": "--num-layers-per-virtual-pipeline-stage",
    },
}
"""What messages that name an option of ``shardyard convert`` name here."""
_SIDES = {"hf": "hf", "mg": "mcore"}
_TARGET_SIZES = (
    "tp", "pp", "ep", "vpp", "moe_grouped_gemm", "transformer_impl", "mtp_num_layers", "dialect",
    "mla_mm_split", "make_vocab_size_divisible_by",
)  # fmt: skip
"""What a Megatron-core folder that is read says of itself, whatever a script repeats."""


def reference_conversion(script: str, words: Sequence[str]) -> Conversion:
    """The conversion that a command line of one of the scripts asks for.

    Raises:
        UserError: an option that is unknown, or refused with the reason.
    """
    return _merge(words) if script.startswith("merge") else _convert(words)


def _merge(words: Sequence[str]) -> Conversion:
    options = parse(_merge_parser(), words)
    source = Path(options.load_dir).expanduser()
    target = options.save_dir or str(source / "hf_ckpt")
    return make_conversion(
        source, target, "hf", form="dcp", config=options.model_configs, dtype=options.dtype,
        shard_bytes=options.shard_size, workers=options.workers, check=options.verify,
    )  # fmt: skip


def _merge_parser() -> Parser:
    parser = Parser(
        prog="merge_dcp_to_hf.py",
        usage="merge_dcp_to_hf.py --load-dir CHECKPOINT [options]",
        description="A checkpoint of a run into a Hugging Face folder.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load-dir", required=True, metavar="DIR", help="the checkpoint, .../checkpoints/global_step_N")
    add("--save-dir", metavar="DIR", help="the folder that is made; by default LOAD_DIR/hf_ckpt")
    add("--model-configs", metavar="DIR", help="folder of config.json and tokenizer, if it has none itself")
    add("--shard-size", type=byte_count, default=5_000_000_000, metavar="BYTES", help="largest file")
    add("--dtype", choices=[*DTYPES, "keep"], default="bf16", help="of floating tensors (default bf16)")
    add("--workers", type=count, metavar="N", help="processes that write files side by side")
    add("--verify", action="store_true", help="read the result again and compare every bit")
    return parser


def _convert(words: Sequence[str]) -> Conversion:
    options = parse(_convert_parser(), words, _REFUSED)
    form, to = _SIDES[options.load_model_type], _SIDES[options.save_model_type]
    source = Path(options.load_dir).expanduser()
    if form != "mcore" and to != "mcore":
        raise UserError("--load-model-type, --save-model-type: one of them is mg; see shardyard convert")
    _check_dense_layers(options, source)
    if to != "mcore":
        for name in _TARGET_SIZES:
            setattr(options, name, None)
    layout, given = mcore_options(options, form, to)
    return make_conversion(
        source, options.save_dir, to, form=form, config=options.hf_cfg_dir, dtype=options.dtype,
        shard_bytes=None, workers=options.workers, check=options.verify, layout=layout, given=given,
        model_type=options.model_type,
    )  # fmt: skip


def _check_dense_layers(options: argparse.Namespace, source: Path) -> None:
    """config.json decides; a script that says something else means another model."""
    if options.first_k_dense_replace is None:
        return
    from shardyard.convert.hf import read_config

    stated = read_config(Path(options.hf_cfg_dir).expanduser() if options.hf_cfg_dir else source)
    found = stated.get("first_k_dense_replace")
    if found != options.first_k_dense_replace:
        raise UserError(
            f"--first-k-dense-replace {options.first_k_dense_replace}: config.json says {found}, and decides"
        )


def _convert_parser() -> Parser:
    parser = Parser(
        prog="convert_ckpt_v2.py",
        usage="convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir DIR --save-dir DIR",
        description="Weights between Hugging Face and Megatron-core folders.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load-model-type", choices=["hf", "mg"], default="hf")
    add("--save-model-type", choices=["mg", "hf"], default="mg")
    add("--load-dir", required=True, metavar="DIR")
    add("--save-dir", required=True, metavar="DIR")
    add("--model-type-hf", dest="model_type", metavar="NAME", help="family; by default config.json's")
    add("--hf-cfg-dir", metavar="DIR", help="folder of config.json and tokenizer")
    add("--target-tensor-parallel-size", dest="tp", type=count, default=1, metavar="N")
    add("--target-pipeline-parallel-size", dest="pp", type=count, default=1, metavar="N")
    add("--target-expert-parallel-size", dest="ep", type=count, default=1, metavar="N")
    add("--expert-tensor-parallel-size", dest="expert_tp", type=count, metavar="N")
    add("--num-layers-per-virtual-pipeline-stage", dest="vpp", type=count, metavar="N")
    add("--num-layer-list", metavar="4,4,...")
    add("--noop-layers", metavar="94,95")
    add("--moe-grouped-gemm", action="store_true")
    add("--moe-tp-extend-ep", action="store_true")
    add("--mla-mm-split", action="store_true")
    add("--mtp-num-layers", type=int, default=0, metavar="N")
    add("--schedules-method", choices=["dualpipev"])
    add("--first-k-dense-replace", type=int, metavar="N", help="checked against config.json")
    add("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    add("--save-layer-by-layer", action="store_true", help="always so: a tensor at a time")
    add("--make-vocab-size-divisible-by", type=count, metavar="N", help="not the reference's: pad")
    add("--dialect", choices=["megatron", "mindspeed"], default="mindspeed", help=argparse.SUPPRESS)
    add("--dtype", choices=[*DTYPES, "keep"], help="not the reference's: cast floating tensors")
    add("--workers", type=count, metavar="N", help="not the reference's: processes side by side")
    add("--verify", action="store_true", help="not the reference's: compare the result with the source")
    return parser
