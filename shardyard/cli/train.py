"""``shardyard train``: check the configuration, start the ranks, wait, and say what went wrong."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.cli.launch import Launch, take_launch
from shardyard.cli.rank import LOST_CONTACT
from shardyard.cli.smoke import smoke
from shardyard.config import Loaded, layout_on, load_config
from shardyard.errors import EXIT_SAVED, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from shardyard.cli.meeting import Start

TRAIN_HELP = """\
usage: shardyard train FILE [overrides] [--smoke] [--nproc-per-node N] [--max-restarts N] [--grace-seconds S]
                       [--nnodes M --node-rank R --master-addr A [--master-port P]]
                       [--nnodes M --rdzv-endpoint HOST:PORT [--rdzv-id NAME]]

Trains as FILE says; overrides are written --section.key value or section.key=value.
  --smoke             try it first: few rows, two steps, a save, a resume and an export beside output_dir,
                      then a verdict; nothing is left behind
  --nproc-per-node N  ranks on this machine (default: one per accelerator; one on a CPU)
  --max-restarts N    after a fault, start all ranks again up to N times (default 0); the run goes on from its
                      last checkpoint
  --grace-seconds S   at SIGTERM or SIGUSR1 the ranks have S seconds to finish their step and save, then
                      they are killed (default 30); exit code 75 says that they have saved
  --nnodes M          machines in the run (default 1); start this command on each of them
  --node-rank R       the number of this machine, from 0
  --master-addr A     a name or address of machine 0 that all of them reach
  --master-port P     a free port there (default 29500; one machine alone picks any free port)
  --rdzv-endpoint E   instead of these three: HOST:PORT of any one machine; they are numbered as they come
  --rdzv-id NAME      tells runs apart that share an endpoint; --rdzv-backend c10d may be given
Started by srun with one task per node, the machines and their numbers come from SLURM.
torchrun with train_fsdp2.py does the same, and so does srun with one task per rank.
"""

RANK_COMMAND = (sys.executable, "-u", "-m", "shardyard.cli.rank")
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What the launcher hands on to the ranks before it ends."""


@dataclass(frozen=True)
class _End:
    """How one start of the ranks ended: exit code, line for stderr, and whether another start may mend it."""

    code: int
    line: str = ""
    may_restart: bool = False


def train(argv: Sequence[str]) -> int:
    """Run the verb and return its exit code: 0, 1 for a fault in a rank, 2 for the user's mistake, 75 when
    the run was asked to stop and has saved.

    Raises:
        UserError: the configuration or the launch is wrong; nothing was started.
    """
    if {"-h", "--help"}.intersection(argv):
        print(TRAIN_HELP, end="")
        return 0
    words = [word for word in argv if word != "--smoke"]
    launch = take_launch(words)
    loaded = load_config(words)
    if launch.nproc_per_node is not None:  # before torch is imported: the answer comes at once
        layout_on(loaded, launch.nproc_per_node * launch.nnodes)
    print(_starting(loaded, launch), flush=True)  # at once: the libraries alone take seconds to load
    ranks = local_rank_count(launch.nproc_per_node)
    layout_on(loaded, ranks * launch.nnodes)
    if launch.nnodes > 1 and launch.node_rank:  # else the log says it soon enough
        print(f"{ranks} rank(s) of node {launch.node_rank} start; the log of the run is node 0's", flush=True)
    if "--smoke" in argv:
        return smoke(loaded, words, ranks, launch)
    return start_ranks([*RANK_COMMAND, *words], ranks, launch)


def _starting(loaded: Loaded, launch: Launch) -> str:
    here = "ranks" if launch.nproc_per_node is None else f"{launch.nproc_per_node} rank(s)"
    return f"{loaded.file or 'the configuration'} is valid; starting {here} on this machine ..."


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


def start_ranks(command: Sequence[str], ranks: int, launch: Launch, *, doing: str = "training") -> int:
    """Run ``command`` in ``ranks`` processes on this machine, wait for all, and return the exit code.

    When one rank fails, the others are ended within ``launch.grace_seconds`` and a summary of what they were
    ``doing`` names it on stderr; ``launch.max_restarts`` times all are started again, unless the user must
    mend something first.

    Raises:
        UserError: the machines did not meet.
    """
    import logging

    from shardyard.cli.meeting import MeetingFailed, open_meeting

    for module in ("multiprocessing.api", "agent.server.api"):  # their many lines become one: the summary
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // ranks, 1)))  # the ranks inherit it
    meeting = open_meeting(launch, ranks)
    for restart in range(launch.max_restarts + 1):
        try:
            start = meeting.next_start()
        except MeetingFailed as error:
            if restart == 0:
                raise UserError(str(error)) from error
            print(f"{doing} stopped: {error}", file=sys.stderr, flush=True)
            return 1
        end = _run_once(command, _launch_config(ranks, launch, start), start, ranks * launch.nnodes, doing)
        if end.line:
            print(end.line, file=sys.stderr, flush=True)
        if end.code == 2:
            meeting.give_up(end.line or "a mistake that its own log tells")
        if not end.may_restart or restart == launch.max_restarts:
            return end.code
        print(f"starting all ranks again: restart {restart + 1} of {launch.max_restarts}", file=sys.stderr)
    raise AssertionError("the last start returns")


def _run_once(
    command: Sequence[str], config: LaunchConfig, start: Start, world_size: int, doing: str
) -> _End:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from shardyard.device import restart, stop_signal

    with tempfile.TemporaryDirectory(prefix="shardyard-launch-") as log_dir:
        saved = Path(log_dir, "saved-step")
        os.environ |= {
            restart.START: str(start.number),
            restart.LAUNCHED: str(start.launched),
            stop_signal.SAVED_FILE: str(saved),
        }  # ranks inherit it
        config.logs_specs = DefaultLogsSpecs(log_dir=log_dir)
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, failure = _first_failure(error)
            if failure.exitcode == EXIT_SAVED:
                return _End(EXIT_SAVED, _saved_line(saved, "a signal"))
            if failure.exitcode == 2 and _cause(failure):
                return _End(2)  # the user's mistake, which that rank has told
            others = "; the other ranks were ended" if world_size > 1 else ""
            return _End(1, f"{doing} stopped: {_summary(rank, failure)}{others}", may_restart=True)
        except SignalException as stop:
            if saved.exists():
                return _End(EXIT_SAVED, _saved_line(saved, stop.sigval.name))
            return _End(128 + stop.sigval, f"stopped by {stop.sigval.name}; all ranks have ended")
        except (RendezvousError, DistError) as error:
            return _End(1, f"{doing} stopped: another machine is gone: {error}", may_restart=True)
    return _End(0)


def _saved_line(saved: Path, signal_name: str) -> str:
    step = f" step {saved.read_text()}" if saved.exists() else ""
    return (
        f"stopped by {signal_name}; the run has saved{step}, go on with "
        "training.resume_from_checkpoint: latest"
    )


def _launch_config(ranks: int, launch: Launch, start: Start) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    port = launch.master_port
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
            "rdzv_endpoint": launch.endpoint,
            "rdzv_configs": {"rank": start.node_rank},
        }
    return LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=ranks,
        run_id=f"{re.sub(r'[^A-Za-z0-9_]', '-', launch.name)}-{start.number}",  # names a folder too
        role="rank",
        max_restarts=0,
        shutdown_timeout=launch.grace_seconds,
        signals_to_handle=_SIGNALS,
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
    head = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode < 0:
        hint = " (often the system out of memory)" if failure.signal_name() == "SIGKILL" else ""
        return f"{head} was killed by signal {-failure.exitcode}, {failure.signal_name()}{hint}"
    cause = _cause(failure)
    return f"{head} ended with exit code {failure.exitcode}{': ' + cause if cause else ''}"
