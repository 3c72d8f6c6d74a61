"""The options of ``shardyard preprocess``: those that act, and those that are refused by name."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import NoReturn

from shardyard.errors import UserError

TRAINING_MIXES = (
    "each data set is written as it is, and mixed when it is trained on (data.mix_strategy, or weights in "
    "dataset.file_name)"
)
_NO_SCRIPTS = "code that comes with data is not run; name the files"
_NO_DEEPSEEK4 = "belongs to a template that is not known here"
_IDS_ONLY = "token ids do not depend on it; the model's vocabulary is padded when the model is made"

REFUSED = {
    "--split-sentences": "documents are not split into sentences: no model that is trained here needs it",
    "--keep-newlines": "line ends are always kept",
    "--hf-datasets-params": _NO_SCRIPTS,
    "--script-data-dir": _NO_SCRIPTS,
    "--dataset-additional-keys": "columns that no output holds are not read",
    "--interleave-probs": TRAINING_MIXES,
    "--seed": "nothing is drawn: the order of the input is kept, and training shuffles it",
    "--data-obfuscation": "obfuscated vocabularies are not supported",
    "--obf-seed-content": "obfuscated vocabularies are not supported",
    "--reasoning-effort": _NO_DEEPSEEK4,
    "--drop-thinking": _NO_DEEPSEEK4,
    "--tokenizer-model": "tokenizers are folders in Hugging Face's layout; use --tokenizer-name-or-path",
    "--make-vocab-size-divisible-by": _IDS_ONLY,
    "--pad-vocab-size-to": _IDS_ONLY,
    "--reward-tokens": "process rewards are not trained here",
}
"""Options of the reference that would have no effect or no meaning, and why."""

_DESCRIPTION = """\
shardyard preprocess --input PATH ... --tokenizer-name-or-path DIR --output-prefix PREFIX [options]
shardyard preprocess merge --input PREFIX ... --output-prefix PREFIX
shardyard preprocess inspect PREFIX [--tokenizer-name-or-path DIR] [--json]

Turns files of rows (json, jsonl, csv, parquet, arrow, txt; .gz and .zst) into Megatron's .bin and .idx, which
training reads with data_manager_type: mg. A killed run goes on when the same command is given again.
"""


class Parser(argparse.ArgumentParser):
    """Faults are a ``UserError``."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"preprocess: {message}; see shardyard preprocess --help")


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The options of ``words``. Refused and unknown ones are named, with the reason or the nearest name."""
    known = [name for action in parser._actions for name in action.option_strings]
    for word in words:
        name = word.split("=")[0].replace("_", "-")
        if not word.startswith("--") or name in known:
            continue
        if name in REFUSED and parser.prog.endswith("preprocess"):
            raise UserError(f"{name}: {REFUSED[name]}")
        near = get_close_matches(name, known, n=1)
        raise UserError(
            f"preprocess has no option {word.split('=')[0]}"
            + (f"; did you mean {near[0]}?" if near else "; see shardyard preprocess --help")
        )
    return parser.parse_args([_hyphens(word) for word in words])


def _hyphens(word: str) -> str:
    """An option as it is spelt here, whichever way the reference's scripts spell it."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def preprocess_parser() -> Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="shardyard preprocess",
        usage=argparse.SUPPRESS,
        description=_DESCRIPTION,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", default=[], metavar="PATH", help="files, folders or globs")
    add("--handler-name", default="text", metavar="NAME", help="what the rows are, see docs/preprocessing.md")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="columns of text, an output each")
    add(
        "--map-keys", metavar="JSON", help='columns and tags, as {"prompt": "question", "response": "answer"}'
    )
    add("--datasets", nargs="+", metavar="NAME", help="names of dataset_info.json (LlamaFactory handler)")
    add("--dataset-dir", metavar="DIR", help="folder of dataset_info.json")
    add("--max-samples", type=count, metavar="N", help="use the first N rows of each input")
    add("--on-bad-row", choices=["stop", "skip"], default="stop", help="a row that cannot be read")
    add("--streaming", action="store_true", help="always so: memory does not grow with the input")
    add("--mix-strategy", default="concat", metavar="concat", help="inputs follow one another")
    add = parser.add_argument_group("tokens").add_argument
    add("--tokenizer-name-or-path", metavar="DIR")
    add("--tokenizer-type", choices=["PretrainedFromHF"], default="PretrainedFromHF", help="the only kind")
    add("--tokenizer-not-use-fast", action="store_true", help="use the slow implementation")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the tokenizer")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--prompt-type", metavar="NAME", help="template; by default the tokenizer's own chat template")
    add("--prompt-type-path", metavar="FILE", help="template file (.yaml, .jinja)")
    add("--enable-thinking", choices=["true", "false", "none"], default="true")
    add("--seq-length", type=count, metavar="N", help="longest sample or pack, in tokens")
    add("--pack", action="store_true", help="fill sequences with samples, which do not see each other")
    add("--neat-pack", action="store_true", help="the same as --pack")
    add("--pad-to-multiple-of", type=count, default=1, metavar="N", help="pad each sequence")
    add = parser.add_argument_group("output and work").add_argument
    add("--output-prefix", metavar="PREFIX", help="the files are PREFIX_text_document.bin and so on")
    add("--overwrite-cache", action="store_true", help="replace outputs that are there")
    add("--workers", type=count, default=1, metavar="N", help="processes that tokenise")
    add("--n-subs", type=count, default=1, metavar="N", help="the same as --workers; the larger one counts")
    add("--log-interval", type=count, metavar="N", help="documents between two lines of progress")
    add(
        "--save-interval", type=float, default=30.0, metavar="SECONDS", help="work that a killed run may lose"
    )
    add("--cache-dir", metavar="DIR", help="where the hashes of large input files are remembered")
    add("--merge-group-keys", nargs="+", metavar="KEY", help="merge the data sets of the folder --input")
    return parser
