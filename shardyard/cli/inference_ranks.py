"""On which ranks a verb after training runs: this process, or several that share the model.

``shardyard generate ... --nproc 2`` starts two ranks, each of which runs ``python -m
shardyard.cli.inference_ranks generate ...``; under torchrun (``torchrun --nproc-per-node 2 -m shardyard
generate ...``) this process is one of them already.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardyard.cli.launch import take_launch
from shardyard.errors import UserError

if TYPE_CHECKING:
    from shardyard.infer.model import Opened
    from shardyard.infer.opening import Choice

RANKS_HELP = """\
ranks, for a model that does not fit one device:
  --nproc N             ranks on this machine (default 1); they share the model, see --parallel
  --nnodes M --node-rank R --master-addr A [--master-port P], or --nnodes M --rdzv-endpoint HOST:PORT
                        more machines, as for `shardyard train`
"""
"""The end of a verb's help: these options are taken before its parser sees the words."""
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_COMMAND = (sys.executable, "-u", "-m", "shardyard.cli.inference_ranks")


def run_verb(
    verb: str,
    words: Sequence[str],
    read: Callable[[Sequence[str]], _Job | None],
    work: Callable[[_Job], int],
) -> int:
    """Run a verb here or on the ranks that its words ask for; its exit code.

    ``read`` makes a job of the words, without torch, or None when it has printed the help; ``work`` does it,
    on every rank. The module ``shardyard.cli.VERB`` has both under these names, for ranks that are started:
    ``read_VERB`` and ``run_VERB``.

    Raises:
        UserError: a wrong option, or ranks that cannot be started.
    """
    own = _spelt(words)
    if is_rank():
        from shardyard.cli.rank import guard

        return guard(lambda: 0 if (job := read(own)) is None else work(job))
    launch = take_launch(own)
    job = read(own)
    if job is None:
        return 0
    if launch.nnodes == 1 and launch.nproc_per_node in (None, 1):
        return work(job)
    from shardyard.cli.train import local_rank_count, start_ranks

    ranks = local_rank_count(launch.nproc_per_node)
    return start_ranks([*_COMMAND, verb, *own], ranks, launch, doing=verb)


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def as_script(work: Callable[[], int]) -> int:
    """The exit code of a script of the reference: of ``work``, 2 for a user's mistake, 130 for Ctrl-C; a rank
    ends by the rules of ranks.
    """
    if is_rank():
        from shardyard.cli.rank import guard

        return guard(work)
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _spelt(words: Sequence[str]) -> list[str]:
    """``--nproc N``, as the verbs after training call it, as `take_launch` knows it."""
    named = [word.partition("=") for word in words]
    return [
        ("--nproc-per-node" if name == "--nproc" else name) + equals + value for name, equals, value in named
    ]


def with_model(choice: Choice, work: Callable[[Opened], _Result]) -> _Result:
    """Open the model on all ranks of this run and do ``work`` with it, on each of them.

    Raises:
        UserError: as `open_model` does, and ``work``.
    """
    log_to_stderr()
    from shardyard.allocator import tune_for_tensors

    tune_for_tensors()
    from transformers.utils import logging as transformers_logging

    from shardyard.device import detect_device, start_process_group
    from shardyard.infer.model import open_model

    transformers_logging.set_verbosity_error()
    device = detect_device()
    group = start_process_group(device)
    try:
        result = work(open_model(choice, group, device, convert=convert_to_hf))
    except UserError:
        group.leave_together()
        raise
    group.stop()
    return result


def convert_to_hf(source: Path, config_dir: Path, target: Path) -> None:
    """A Megatron-core folder as a Hugging Face one."""
    from shardyard.convert.job import convert_to_hf as convert

    convert(source, config_dir, target)


def log_to_stderr() -> None:
    """The package's log in plain lines to stderr, as stdout is for answers; of other ranks warnings only."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    handler.set_name("shardyard")
    package = logging.getLogger("shardyard")
    for old in [found for found in package.handlers if found.get_name() == handler.get_name()]:
        package.removeHandler(old)
    package.addHandler(handler)
    package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    package.propagate = False


def _rank_main(words: Sequence[str]) -> int:
    """One started rank: the verb, then its words."""
    module: Any = importlib.import_module(f"shardyard.cli.{words[0]}")
    return run_verb(
        words[0], words[1:], getattr(module, f"read_{words[0]}"), getattr(module, f"run_{words[0]}")
    )


if __name__ == "__main__":
    sys.exit(_rank_main(sys.argv[1:]))
