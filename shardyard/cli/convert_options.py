"""The options of ``shardyard convert``, and how the values of one become typed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from shardyard.errors import UserError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

DESCRIPTION = """\
shardyard convert SRC DST --to hf|dcp|mcore [options]

Turns the weights of SRC (a Hugging Face folder, a checkpoint of a run, a Megatron-core folder: found out)
into another form in the new folder DST. A killed conversion goes on when the same command is given again.
"""


class Parser(argparse.ArgumentParser):
    """Faults are a ``UserError`` that names the command."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.split()[-1]}: {message}; see {self.prog} --help")


def parse(
    parser: Parser, words: Sequence[str], refused: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """The options of ``words``. Refused and unknown ones are named, with the reason or the nearest name."""
    known = [name for action in parser._actions for name in action.option_strings]
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in known:
            continue
        if refused and name in refused:
            raise UserError(f"{name}: {refused[name]}")
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help"
        raise UserError(f"{parser.prog.split()[-1]} has no option {name}; {hint}")
    return parser.parse_args(list(words))


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def byte_count(text: str) -> int:
    """Bytes: ``5000000000``, ``5GB``, ``500 MiB``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, as 5000000000, 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def convert_parser() -> Parser:
    parser = Parser(
        prog="shardyard convert",
        usage=argparse.SUPPRESS,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="the folder that is read")
    parser.add_argument("target", metavar="DST", help="the folder that is made")
    add = parser.add_argument_group("conversion").add_argument
    add("--to", choices=["hf", "dcp", "mcore"], help="what DST will be")
    add("--from", dest="form", choices=["hf", "dcp", "mcore"], help="what SRC is, if that is in doubt")
    add("--config", metavar="DIR", help="folder of config.json and tokenizer, where SRC has none")
    add(
        "--dtype",
        choices=[*DTYPES, "keep"],
        help="of floating tensors; by default as stored, and from a checkpoint to hf as config.json states",
    )
    add("--shard-size", type=byte_count, metavar="SIZE", help="largest file of hf and dcp, as 5GB (default)")
    add("--workers", type=count, metavar="N", help="processes that write files side by side")
    add("--verify", action="store_true", help="read the result again and compare every bit with SRC")
    add_mcore_options(parser.add_argument_group("Megatron-core").add_argument)
    return parser


def add_mcore_options(add: Callable[..., object]) -> None:
    """Layout of a Megatron-core folder, written or read."""
    add("--tp", type=count, metavar="N", help="tensor-parallel size")
    add("--pp", type=count, metavar="N", help="pipeline-parallel size")
    add("--ep", type=count, metavar="N", help="expert-parallel size")
    add("--expert-tp", type=count, metavar="N", help="cuts of each expert: 1, or as --tp (default)")
    add("--vpp", type=count, metavar="N", help="layers of a virtual stage")
    add("--num-layer-list", metavar="4,4,...", help="layers of each stage, where they differ")
    add("--noop-layers", metavar="94,95", help="places that hold no layer")
    add("--moe-grouped-gemm", action="store_true", help="the experts of a rank in joined tensors")
    add("--moe-tp-extend-ep", action="store_true", help="experts divided over tp x ep ranks")
    add("--transformer-impl", choices=["local", "transformer_engine"], help="names of the layers' parts")
    add("--schedules-method", choices=["dualpipev"], help="a stage holds a front and a back piece")
    add("--make-vocab-size-divisible-by", type=count, metavar="N", help="pad the vocabulary with zeros")
    add("--mtp-num-layers", type=int, metavar="N", help="layers that predict further tokens; default all")
    add("--mla-mm-split", action="store_true", help="latent projections in two parts (MindSpeed)")
    add("--dialect", choices=["megatron", "mindspeed"], help="names of latent attention and MTP layers")
    add("--model-type", metavar="NAME", help="family, where config.json's model_type is another")
