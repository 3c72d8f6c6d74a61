"""Options that the verbs after training share: which model, how its answers are sampled, on which ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from shardyard.cli.convert_options import Parser, count, parse
from shardyard.errors import UserError
from shardyard.infer.asked import Asked
from shardyard.infer.opening import Choice
from shardyard.infer.types import MAX_TOP_LOGPROBS

_CHOICE = (
    "model", "tokenizer", "config", "checkpoint", "dtype", "attn_implementation", "trust_remote_code",
    "template", "enable_thinking", "parallel",
)  # fmt: skip
_NARROWING = ("temperature", "top_p", "top_k", "min_p")


def verb_parser(verb: str, description: str) -> Parser:
    """A parser in the house's style; add options to it and read them with `parse_verb`."""
    return Parser(
        prog=f"shardyard {verb}",
        usage=argparse.SUPPRESS,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_verb(parser: Parser, words: Sequence[str]) -> argparse.Namespace | None:
    """The options of ``words``; None when the help has been printed.

    Raises:
        UserError: an unknown option, a missing or a wrong value.
    """
    try:
        return parse(parser, words)
    except SystemExit:
        return None


def add_model_options(parser: Parser, *, required: bool = True) -> None:
    """Which model, and in which form."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model", metavar="PATH", required=required,
        help="a run's output_dir, a checkpoint, a Hugging Face, DCP or Megatron-core folder, or a hub id",
    )  # fmt: skip
    add("--checkpoint", default="latest", metavar="WHICH", help="of a run: latest (default), best or a step")
    add("--tokenizer", metavar="PATH", help="folder of the tokenizer, where it is not the model's")
    add("--config", metavar="DIR", help="folder of config.json, where the weights have none")
    add(
        "--dtype", choices=["auto", "fp32", "bf16", "fp16"], default="auto",
        help="of the weights; auto: the run's on an accelerator, fp32 on a CPU",
    )  # fmt: skip
    add("--template", metavar="NAME", help="chat template by name or file, instead of the model's own")
    add(
        "--enable-thinking", action=argparse.BooleanOptionalAction,
        help="let the model think before it answers, or not, where its template knows of it",
    )  # fmt: skip
    add("--attn-implementation", metavar="NAME", help="eager, sdpa, flash_attention_2, ...")
    add("--trust-remote-code", action="store_true", help="run the Python files of the model's folder")
    add(
        "--parallel", choices=["auto", "none", "tp", "fsdp"], default="auto",
        help="how several ranks share the model; auto: tp where the family knows it, else fsdp",
    )  # fmt: skip


def choice_of(options: argparse.Namespace) -> Choice:
    """Which model the options of `add_model_options` name."""
    return Choice(**{name: getattr(options, name) for name in _CHOICE})


def add_sampling_options(parser: Parser) -> None:
    """How the next token is chosen, and when an answer ends."""
    group = parser.add_argument_group(
        "sampling",
        "What no option names is as the run's `inference:` section says, then the model's generation config; "
        "without all of them the likeliest token is taken.",
    )
    add = group.add_argument
    add("--max-new-tokens", type=count, metavar="N", help="longest answer")
    add(
        "--do-sample", action=argparse.BooleanOptionalAction,
        help="draw tokens, or take the likeliest; --temperature, --top-p, --top-k and --min-p ask for it too",
    )  # fmt: skip
    add("--temperature", type=number(0, 100), metavar="T", help="0 takes the likeliest token")
    add("--top-p", type=number(0, 1, above=True), metavar="P", help="likeliest tokens up to this mass")
    add("--top-k", type=whole, metavar="K", help="likeliest K tokens; 0: all")
    add("--min-p", type=number(0, 1), metavar="P", help="tokens of at least this share of the likeliest")
    add("--repetition-penalty", type=number(0, 100, above=True), metavar="R", help="above 1: fewer repeats")
    add("--presence-penalty", type=number(-2, 2), metavar="R", help="off the scores of tokens of the answer")
    add("--frequency-penalty", type=number(-2, 2), metavar="R", help="the same, once per occurrence")
    add("--seed", type=whole, metavar="N", help="of the drawn tokens; answers of one seed are equal")
    add(
        "--stop", action="append", type=_text, metavar="TEXT",
        help="ends the answer and is cut off; may be given several times",
    )  # fmt: skip


def asked_of(options: argparse.Namespace) -> Asked:
    """What the options of `add_sampling_options` (and ``--logprobs``, ``--num-beams``) ask for.

    Raises:
        UserError: options that contradict.
    """
    if options.do_sample is False:
        for name in _NARROWING:
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} with --no-do-sample: the likeliest token is taken then; leave one")
    if options.do_sample and options.temperature == 0.0:
        raise UserError("--temperature 0 with --do-sample: it takes the likeliest token; leave one")
    return Asked.of(vars(options))


def add_logprobs_option(add: Callable[..., object]) -> None:
    """``--logprobs [K]``, into a group of options."""
    add(
        "--logprobs", type=_number_of_logprobs, nargs="?", const=0, metavar="K",
        help="log-probability of each token, and of the K likeliest",
    )  # fmt: skip


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _number_of_logprobs(text: str) -> int:
    value = whole(text)
    if value > MAX_TOP_LOGPROBS:
        raise argparse.ArgumentTypeError(f"{value} is above {MAX_TOP_LOGPROBS}")
    return value


def number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option: a number from ``least`` (``above``: without it) to ``most``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (above and value == least):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {'above' if above else 'from'} {least:g}"
                f"{', at most' if above else ' to'} {most:g}"
            )
        return value

    return read


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty text would end every answer at once")
    return text
