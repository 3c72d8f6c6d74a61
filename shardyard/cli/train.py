"""``shardyard train``: check the configuration, start the ranks, wait, and say what went wrong."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardyard.cli.rank import LOST_CONTACT
from shardyard.config import load_config, resolve_layout
from shardyard.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

TRAIN_HELP = """\
usage: shardyard train FILE [overrides] [--nproc-per-node N]
                       [--nnodes M --node-rank R --master-addr A [--master-port P]]

Trains as FILE says; overrides are written --section.key value or section.key=value.
  --nproc-per-node N  ranks on this machine (default: one per accelerator; one on a CPU)
  --nnodes M          machines in the run (default 1); start this command on each of them
  --node-rank R       the number of this machine, from 0
  --master-addr A     a name or address of machine 0 that all of them reach
  --master-port P     a free port there (default 29500; one machine alone picks any free port)
torchrun with train_fsdp2.py does the same.
"""

RANK_COMMAND = (sys.executable, "-u", "-m", "shardyard.cli.rank")
_SHUTDOWN_SECONDS = 20
"""From asking a rank to end to killing it: with the rest of an end well below a minute."""


@dataclass(frozen=True)
class Launch:
    """Where the ranks run. ``nproc_per_node`` None: one per accelerator."""

    nproc_per_node: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None


def train(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code: 0, 1 for a fault in a rank, 2 for the user's mistake.

    Raises:
        UserError: the configuration or the launch is wrong; nothing was started.
    """
    if {"-h", "--help"}.intersection(argv):
        print(TRAIN_HELP, end="")
        return 0
    words = list(argv)
    launch = take_launch(words)
    loaded = load_config(words)
    if launch.nproc_per_node is not None:  # before torch is imported: the answer comes at once
        resolve_layout(loaded.config.parallel, launch.nproc_per_node * launch.nnodes)
    ranks = local_rank_count(launch.nproc_per_node)
    resolve_layout(loaded.config.parallel, ranks * launch.nnodes)
    return start_ranks([*RANK_COMMAND, *words], ranks, launch)


def take_launch(words: list[str]) -> Launch:
    """Remove the launch options from ``words``; both spellings, with ``-`` and ``_``, are known.

    Raises:
        UserError: an option without a value, or one that does not fit the others.
    """
    found: dict[str, str] = {}
    names = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"}
    index = 0
    while index < len(words):
        option, equals, value = words[index].partition("=")
        name = option[2:].replace("-", "_")
        if not option.startswith("--") or name not in names:
            index += 1
            continue
        if not equals and index + 1 == len(words):
            raise UserError(f"{option} needs a value")
        found[name] = value if equals else words[index + 1]
        del words[index : index + (1 if equals else 2)]
    launch = Launch(
        nproc_per_node=_number(found, "nproc_per_node", 1),
        nnodes=_number(found, "nnodes", 1) or 1,
        node_rank=_number(found, "node_rank", 0) or 0,
        master_addr=found.get("master_addr"),
        master_port=_number(found, "master_port", 1),
    )
    if launch.nnodes > 1 and (launch.master_addr is None or "node_rank" not in found):
        raise UserError(f"--nnodes {launch.nnodes} needs --node-rank and --master-addr on each machine")
    if launch.node_rank >= launch.nnodes:
        raise UserError(f"--node-rank {launch.node_rank} with --nnodes {launch.nnodes}: ranks count from 0")
    return launch


def _number(found: Mapping[str, str], name: str, least: int) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(f"--{name.replace('_', '-')} {text}: a whole number from {least} on is wanted")
    return int(text)


def local_rank_count(wanted: int | None) -> int:
    """``wanted`` ranks, or one per accelerator of this machine.

    Raises:
        UserError: more ranks than accelerators, or accelerators that cannot be used.
    """
    from shardyard.device import visible_accelerators

    kind, count = visible_accelerators()
    if count and wanted is not None and wanted > count:
        raise UserError(
            f"--nproc-per-node {wanted}, but this machine has {count} {kind} device(s): start at most {count}"
        )
    return wanted if wanted is not None else max(count, 1)


def start_ranks(command: Sequence[str], ranks: int, launch: Launch) -> int:
    """Run ``command`` in ``ranks`` processes on this machine, wait for all, and return the exit code.

    When one rank fails, the others are ended within ``_SHUTDOWN_SECONDS`` and a summary names it on stderr.
    """
    import logging

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    for module in ("multiprocessing.api", "agent.server.api"):  # their many lines become one: the summary
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // ranks, 1)))  # the ranks inherit it
    with tempfile.TemporaryDirectory(prefix="shardyard-launch-") as log_dir:
        config = _launch_config(ranks, launch, log_dir)
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, failure = _first_failure(error)
            if failure.exitcode == 2 and _cause(failure):
                return 2  # the user's mistake, which that rank has told
            others = "; the other ranks were ended" if ranks * launch.nnodes > 1 else ""
            print(_summary(rank, failure) + others, file=sys.stderr, flush=True)
            return 1
        except SignalException as stop:
            print(f"stopped by {stop.sigval.name}; all ranks have ended", file=sys.stderr, flush=True)
            return 128 + stop.sigval
        except (RendezvousError, DistError) as error:
            raise UserError(
                f"the machines of this run did not meet at {config.rdzv_endpoint} (--master-addr, "
                f"--master-port): {error}. Is the port free, and this command started on all {launch.nnodes}?"
            ) from error
    return 0


def _launch_config(ranks: int, launch: Launch, log_dir: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    address, port = launch.master_addr, launch.master_port
    if launch.nnodes == 1 and port is not None and not _is_free(port):
        print(f"port {port} is in use: the ranks meet at a free one instead", file=sys.stderr, flush=True)
        port = None
    if launch.nnodes == 1 and port is None:
        meeting: dict[str, Any] = {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    else:
        meeting = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{address or '127.0.0.1'}:{port or 29500}",
            "rdzv_configs": {"rank": launch.node_rank},
        }
    return LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=ranks,
        run_id="shardyard",
        role="rank",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        **meeting,
    )


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """(global rank, failure) of the rank that pulled the others down.

    torch lists failures as it finds them, and those that it ended itself last; ranks that merely lost another
    one may stand between.
    """

    def pulled_down(item: tuple[int, ProcessFailure]) -> bool:
        return item[1].exitcode == -signal.SIGTERM or _cause(item[1]).startswith(LOST_CONTACT)

    return min(error.failures.items(), key=pulled_down)


def _cause(failure: ProcessFailure) -> str:
    message = failure.message
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _summary(rank: int, failure: ProcessFailure) -> str:
    head = f"training stopped: rank {rank} (pid {failure.pid})"
    if failure.exitcode < 0:
        hint = " (often the system out of memory)" if failure.signal_name() == "SIGKILL" else ""
        return f"{head} was killed by signal {-failure.exitcode}, {failure.signal_name()}{hint}"
    cause = _cause(failure)
    return f"{head} ended with exit code {failure.exitcode}{': ' + cause if cause else ''}"
