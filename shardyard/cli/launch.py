"""How a run is started: the launch options of ``shardyard train``, what SLURM adds, and what contradicts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardyard.cli import slurm
from shardyard.errors import UserError

DEFAULT_PORT = 29500
_NAMES = {
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port",
    "rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts", "grace_seconds",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Where the ranks run.

    ``nproc_per_node`` None: one per accelerator; ``node_rank`` None: machines are numbered as they come.
    """

    nproc_per_node: int | None = None
    nnodes: int = 1
    node_rank: int | None = 0
    master_addr: str | None = None
    """A name or address of the machine where all machines meet."""
    master_port: int | None = None
    name: str = "shardyard"
    """Tells runs apart that meet at one address and port."""
    max_restarts: int = 0
    grace_seconds: int = 30
    """From asking the ranks to end to killing them; torchrun's own is as long."""

    @property
    def endpoint(self) -> str:
        return f"{self.master_addr or '127.0.0.1'}:{self.master_port or DEFAULT_PORT}"


def take_launch(words: list[str], environ: Mapping[str, str] | None = None) -> Launch:
    """Remove the launch options from ``words``; both spellings, with ``-`` and ``_``, are known.

    What no option says is taken from SLURM's variables, if SLURM started this process; a line tells what.

    Raises:
        UserError: an option without a value, or one that does not fit the others or SLURM's variables.
    """
    found = _take_options(words)
    if "nnodes" not in found or _number(found, "nnodes", 1) != 1:
        taken, line = slurm.launch_values(os.environ if environ is None else environ, found)
        found |= taken
        if line:
            print(line, file=sys.stderr, flush=True)
    nnodes = _number(found, "nnodes", 1) or 1
    launch = Launch(
        nproc_per_node=_number(found, "nproc_per_node", 1),
        nnodes=nnodes,
        max_restarts=_number(found, "max_restarts", 0) or 0,
        grace_seconds=_number(found, "grace_seconds", 1) or Launch.grace_seconds,
    )
    if any(name.startswith("rdzv") for name in found):
        return _by_rendezvous(found, launch)
    launch = replace(
        launch,
        node_rank=_number(found, "node_rank", 0) or 0,
        master_addr=found.get("master_addr"),
        master_port=_number(found, "master_port", 1),
    )
    if nnodes > 1 and (launch.master_addr is None or "node_rank" not in found):
        raise UserError(
            f"--nnodes {nnodes} needs --node-rank and --master-addr on each machine, or --rdzv-endpoint"
        )
    if (launch.node_rank or 0) >= nnodes:
        raise UserError(f"--node-rank {launch.node_rank} with --nnodes {nnodes}: ranks count from 0")
    return launch


def _take_options(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    index = 0
    while index < len(words):
        option, equals, value = words[index].partition("=")
        name = option[2:].replace("-", "_")
        if not option.startswith("--") or name not in _NAMES:
            index += 1
            continue
        if not equals and index + 1 == len(words):
            raise UserError(f"{option} needs a value")
        found[name] = value if equals else words[index + 1]
        del words[index : index + (1 if equals else 2)]
    return found


def _by_rendezvous(found: Mapping[str, str], launch: Launch) -> Launch:
    """The machines are numbered as they come to the endpoint; the one that keeps it is node 0."""
    clash = sorted({"node_rank", "master_addr", "master_port"}.intersection(found))
    if clash:
        option = f"--{clash[0].replace('_', '-')}"
        raise UserError(
            f"{option} beside --rdzv-*: give --rdzv-endpoint alone (machines are numbered as they come), or "
            "--node-rank with --master-addr alone"
        )
    backend = found.get("rdzv_backend", "c10d")
    if backend != "c10d":
        raise UserError(f"--rdzv-backend {backend}: there is c10d; for static, give --master-addr instead")
    launch = replace(launch, name=found.get("rdzv_id", launch.name))
    if launch.nnodes == 1:
        return launch
    if "rdzv_endpoint" not in found:
        raise UserError("--rdzv-endpoint HOST:PORT is needed: where all machines of the run meet")
    host, _, port = found["rdzv_endpoint"].rpartition(":")
    if not host:
        host, port = port, str(DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"--rdzv-endpoint {found['rdzv_endpoint']}: HOST:PORT is wanted, such as node0:29500")
    return replace(launch, node_rank=None, master_addr=host.strip("[]"), master_port=int(port))


def _number(found: Mapping[str, str], name: str, least: int) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(f"--{name.replace('_', '-')} {text}: a whole number from {least} on is wanted")
    return int(text)
