"""The reference's ``inference_fsdp2.py``: the YAML of a training, and a conversation with its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardyard.cli.inference_ranks import as_script, with_model
from shardyard.config import ConfigError, Loaded, load_config
from shardyard.errors import UserError
from shardyard.infer.opening import Choice
from shardyard.infer.prompts import Wanted

if TYPE_CHECKING:
    from shardyard.infer.model import Opened

HELP = """\
usage: inference_fsdp2.py FILE.yaml [--section.key value ...]
       torchrun --nproc_per_node N inference_fsdp2.py FILE.yaml ...

A conversation with the model of FILE.yaml. Its `model:` and `inference:` sections are read; others may be
there or not. exit, quit or the input's end leave. `shardyard chat` and `shardyard generate` do more.
"""


@dataclass(frozen=True)
class Job:
    """What the YAML asks for; ``section`` is its ``inference:``."""

    choice: Choice
    section: dict[str, Any]
    backend: str


def main(argv: Sequence[str]) -> int:
    """Run the script; its exit code."""
    if {"-h", "--help"}.intersection(argv):
        print(HELP, end="")
        return 0
    return as_script(lambda: run(read(argv)))


def read(argv: Sequence[str]) -> Job:
    """The job of a YAML and its overrides; ``training.output_dir`` need not be there.

    Raises:
        UserError: what is wrong with the configuration.
    """
    loaded = _load(list(argv))
    config, section = loaded.config, loaded.config.inference.model_dump()
    sampled = any(section[name] is not None for name in ("temperature", "top_p", "top_k", "min_p"))
    if not _is_set(loaded, "inference.do_sample") and not sampled:
        section["do_sample"] = False  # the reference's default, whatever the model's files say
    if (section["num_beams"] or 1) > 1:
        raise UserError("inference.num_beams: a conversation is not searched with beams; see generate")
    thinking = config.data.enable_thinking if _is_set(loaded, "data.enable_thinking") else None
    template = config.data.template if _is_set(loaded, "data.template") else None
    model = config.model
    choice = Choice(
        model.model_name_or_path, tokenizer=model.tokenizer_name_or_path, config=model.config_name_or_path,
        dtype=config.parallel.param_dtype or "auto", attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code, template=section["template"] or template,
        enable_thinking=thinking, parallel=_parallel(loaded),
    )  # fmt: skip
    return Job(choice, section, section["infer_backend"])


def _load(words: list[str]) -> Loaded:
    try:
        return load_config(words)
    except ConfigError as error:
        if not any(fault.path == "training.output_dir" and "not set" in str(fault) for fault in error.faults):
            raise
        return load_config([*words, "--training.output_dir=unused"])


def _is_set(loaded: Loaded, path: str) -> bool:
    return loaded.origins[path].kind != "default"


def _parallel(loaded: Loaded) -> Literal["none", "tp", "fsdp"]:
    """How the ranks share the model, by ``parallel:``."""
    ranks, size = int(os.environ.get("WORLD_SIZE", "1")), loaded.config.parallel.tp_size
    if ranks == 1:
        return "none"
    if size not in (1, ranks):
        raise UserError(
            f"parallel.tp_size {size} with {ranks} ranks: for inference all ranks share a model in one way, "
            f"tp_size {ranks} or, by fsdp, 1"
        )
    return "fsdp" if size == 1 else "tp"


def run(job: Job) -> int:
    """Talk, on all ranks of the run."""
    if job.backend != "huggingface":
        from shardyard.cli.other_engines import talk_with

        return talk_with(job.backend, job.choice, job.section)
    return with_model(job.choice, lambda opened: _talk(job, opened))


def _talk(job: Job, opened: Opened) -> int:
    from shardyard.infer.talk import FSDP2, converse

    return converse(opened, FSDP2, Wanted(), section=job.section)
