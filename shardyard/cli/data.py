"""``shardyard data report`` and ``shardyard data preview``: look at the data of a run before it trains."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from shardyard.cli.words import take_flag, take_number, take_numbers, take_text
from shardyard.config import Config, Layout, fewest_ranks, layout_of, load_config
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.data.build import RunData
    from shardyard.data.inspect import Style, View, Wanted

DATA_HELP = """\
usage: shardyard data report FILE [overrides] [--json] [--world-size N] [--windows N]
       shardyard data preview FILE [overrides] [options]

Prepares the data as the run of this configuration would (into the same cache) and shows it; no model is
loaded. FILE and overrides are those of shardyard train.

report: rows, samples and tokens of each data set and of all, what was dropped and why, duplicates, lengths,
what an epoch holds, packs, validation sets, updates.
  --json          the same as JSON (docs/data.md lists the keys)
  --world-size N  the number of ranks that will train (default: the fewest that the layout fits)

preview: samples as text, with the trained part in colour, or in [[ ]] where the output is no terminal (or
NO_COLOR is set). Without options the first 3 in training order.
  --index I ...      samples by their number
  --pack I ...       the samples of packs, by their number in epoch 0
  --longest N, --shortest N, --truncated N, --random N
  --most-trained N, --least-trained N    by the trained share of a sample's tokens
  --source NAME      of this data set only
  --ids              also each token: position, id, target, text
  --max-tokens N     of each sample (default 1024)

both:
  --windows N        with data.streaming: look at the first N windows (default 1)
"""


def data(argv: Sequence[str]) -> int:
    """Run the verb.

    Raises:
        UserError: a wrong option or configuration, or data that cannot be prepared.
    """
    words = list(argv)
    if not words or {"-h", "--help"}.intersection(words):
        print(DATA_HELP, end="")
        return 0 if words else 2
    job = {"report": _report, "preview": _preview}.get(words[0])
    if job is None:
        raise UserError(f"shardyard data: {words[0]!r} is not report or preview; see shardyard data --help")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # text of any rows, on a terminal of any encoding
    job(words[1:])
    return 0


def _report(words: list[str]) -> None:
    as_json = take_flag(words, "--json")
    world_size = take_number(words, "--world-size", default=0) or None
    windows = take_number(words, "--windows", default=1)
    with _opened(words, world_size, windows) as run:
        from shardyard.data.inspect import blocks_of, survey

        ranks, readers = run.layout.world_size, run.layout.data_parallel
        found = survey(run.config, run.data, run.view, world_size=ranks, data_parallel=readers)
        if as_json:
            print(json.dumps(found, indent=2, ensure_ascii=False))
            return
        style = _style(sys.stdout, os.environ)
        for heading, lines in blocks_of(found, run.view):
            print(style.heading(f"{_printable(heading)}:"))
            for line in lines:
                print(_printable(line))


def _preview(words: list[str]) -> None:
    show_ids = take_flag(words, "--ids")
    max_tokens = take_number(words, "--max-tokens", default=1024)
    windows = take_number(words, "--windows", default=1)
    wanted = _wanted(words)
    with _opened(words, None, windows) as run:
        from shardyard.data.inspect import select, show

        style = _style(sys.stdout, os.environ)
        found = select(run.view, wanted, seed=run.config.training.seed)
        if run.view.stretch is not None:
            print(f"{run.view.stretch}; samples are numbered from its first")
        for what, numbers in found:
            count = "" if numbers else ": none"
            print(style.heading(f"== {what}{count}"))
            for number in numbers:
                for line in show(run.view, number, run.tokenizer, style, max_tokens=max_tokens, ids=show_ids):
                    print(line)
                print()


def _wanted(words: list[str]) -> Wanted:
    from shardyard.data.inspect import Wanted

    counts = {
        name: take_number(words, f"--{name.replace('_', '-')}", default=0)
        for name in ("longest", "shortest", "truncated", "most_trained", "least_trained", "random")
    }
    return Wanted(
        index=tuple(take_numbers(words, "--index")),
        pack=tuple(take_numbers(words, "--pack")),
        source=take_text(words, "--source"),
        **counts,
    )


@dataclass(frozen=True)
class _Run:
    config: Config
    tokenizer: Any
    data: RunData
    view: View
    layout: Layout


@contextmanager
def _opened(words: list[str], world_size: int | None, windows: int) -> Iterator[_Run]:
    """The data of the configuration in ``words``, on as few ranks as its layout needs if nobody says how
    many; closed at the end.
    """
    loaded = load_config(words)
    config = loaded.config
    layout = layout_of(config, fewest_ranks(config) if world_size is None else world_size)
    if windows > 1 and not config.data.streaming:
        raise UserError("--windows: only a stream has windows; set data.streaming, or leave it out")
    _log_to_stderr()
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)

    from shardyard.data.build import build_run_data
    from shardyard.data.inspect import view_of
    from shardyard.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    data = build_run_data(config, tokenizer, dp_size=layout.data_parallel)
    try:
        yield _Run(config, tokenizer, data, view_of(config, data, tokenizer, windows=windows), layout)
    finally:
        data.close()


def _log_to_stderr() -> None:
    """Progress and warnings go to stderr: what is on stdout is the answer alone."""
    package = logging.getLogger("shardyard")
    package.handlers = []
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False


def _style(stream: TextIO, environ: Mapping[str, str]) -> Style:
    """Colours on a terminal, unless NO_COLOR is set to anything (no-color.org) or it knows none."""
    from shardyard.data.inspect import Style

    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return Style(colour=stream.isatty() and not plain)


def _printable(text: str) -> str:
    from shardyard.data.inspect.show import visible

    return visible(text)
