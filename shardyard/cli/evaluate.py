"""``shardyard evaluate``: the loss of data sets, benchmarks (evaluate_tasks.py), and comparison of two runs
of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.cli.convert_options import Parser
from shardyard.cli.evaluate_data import DataJob, read_data, run_data
from shardyard.cli.evaluate_tasks import (
    TaskJob,
    add_task_options,
    compare_files,
    is_about_tasks,
    read_tasks,
    run_tasks,
)
from shardyard.cli.inference_options import add_model_options, parse_verb, verb_parser
from shardyard.cli.inference_ranks import RANKS_HELP, run_verb
from shardyard.config.schema import SECTIONS
from shardyard.errors import UserError

DESCRIPTION = """\
usage: shardyard evaluate CONFIG.yaml [--section.key VALUE ...] [options]
       shardyard evaluate --model PATH [--data NAME|FILE|CONFIG.yaml ...] [options]
       shardyard evaluate --model PATH --tasks NAME ... --task-data-path DIR [options]
       shardyard evaluate --compare A.json B.json

Without --tasks: loss, perplexity and bits per byte of data sets, as a validation of the training would score
them: with the run's template, cut-off and packing. Of a run the settings and the data are its own, unless
--data or CONFIG.yaml say otherwise; settings are overridden as for `shardyard train`.
"""
_SETTING = re.compile(rf"(?:--)?(?:{'|'.join(SECTIONS)})\.[A-Za-z_]")
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class CompareJob:
    """Two files of results."""

    first: Path
    second: Path


Job = DataJob | TaskJob | CompareJob


def evaluate(argv: Sequence[str]) -> int:
    """Run the verb; its exit code.

    Raises:
        UserError: a wrong option, or what the job raises.
    """
    return run_verb("evaluate", argv, read_evaluate, run_evaluate)


def read_evaluate(words: Sequence[str]) -> Job | None:
    """The job of the words; None when the help has been printed."""
    own, settings = take_settings(words)
    options = parse_verb(_parser(), own)
    if options is None:
        return None
    if options.compare:
        return CompareJob(*options.compare)
    if is_about_tasks(options):
        if settings or options.config_file or options.data:
            raise UserError(
                "--tasks: benchmarks read no data set and no settings of a training; leave them out"
            )
        return read_tasks(options)
    return read_data(options, settings)


def run_evaluate(job: Job) -> int:
    """Do the job, on every rank."""
    if isinstance(job, CompareJob):
        return compare_files(job.first, job.second)
    return run_tasks(job) if isinstance(job, TaskJob) else run_data(job)


def take_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The verb's own words, and the settings: ``--section.key VALUE ...``, ``section.key=value``."""
    own: list[str] = []
    settings: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _SETTING.match(word):
            own.append(word)
            continue
        settings.append(word)
        first = True
        while "=" not in word and rest and not rest[0].startswith("--") and not _SETTING.match(rest[0]):
            if not first and rest[0].endswith(_YAML):
                break
            settings.append(rest.pop(0))
            first = False
    return own, settings


def _parser() -> Parser:
    parser = verb_parser("evaluate", DESCRIPTION)
    parser.epilog = RANKS_HELP
    parser.add_argument("config_file", nargs="?", metavar="CONFIG.yaml", help="settings of a training")
    add_model_options(parser, required=False)
    add = parser.add_argument_group("loss of data sets").add_argument
    add(
        "--data", action="append", nargs="+", metavar="NAME",
        help="a data set of dataset_info.json, a file or folder, or a CONFIG.yaml with its data; default: "
        "the settings' data.eval_dataset, their held-out rows, or else what is trained on",
    )  # fmt: skip
    add_task_options(parser, output=True)
    return parser
