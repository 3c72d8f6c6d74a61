"""What SLURM says about this process, read from its variables alone: no ``scontrol``, no network.

Only a process that ``srun`` started counts. In the shell of an ``salloc`` or the script of an ``sbatch``
SLURM's variables describe the whole allocation, but the process is one, on one machine.
Variables: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from shardyard.errors import UserError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from here on are SLURM's own: the batch script, an interactive shell."""
_PORTS = range(15000, 30000)  # below the ports that systems hand out by themselves


def launch_values(environ: Mapping[str, str], given: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(launch options that ``given`` lacks, a line that says so), for ``srun shardyard train``.

    Raises:
        UserError: several tasks on a machine, each of which would start all ranks.
    """
    nnodes = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if nnodes is None or not nnodes.isdigit():
        return {}, ""
    if not _in_step(environ):
        if int(nnodes) == 1 or {"nnodes", "rdzv_endpoint"}.intersection(given):
            return {}, ""
        return {}, (
            f"SLURM: this allocation has {nnodes} nodes; training on this one alone, for srun did not start "
            "this command (srun --ntasks-per-node=1 shardyard train ... uses all)"
        )
    tasks = _tasks_per_node(environ)
    if tasks and max(tasks) > 1:
        raise UserError(
            f"SLURM started {max(tasks)} tasks on a node, and each shardyard train starts all ranks of its "
            "machine: add --ntasks-per-node=1 to srun, or run train_fsdp2.py with one task per rank"
        )
    if int(nnodes) == 1 and given.get("nnodes") is None:
        return {}, ""
    values = {"nnodes": nnodes}
    if not any(name.startswith("rdzv") for name in given):
        values |= {
            "node_rank": environ.get("SLURM_NODEID", ""),
            "master_addr": _first_host(environ),
            "master_port": str(_port(environ)),
        }
    taken = {name: value for name, value in values.items() if name not in given and value}
    said = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in taken.items())
    return taken, f"taken from SLURM: {said}" if taken else ""


def adopt_rank(environ: MutableMapping[str, str]) -> str:
    """Set torch's variables of a rank that ``srun`` started as one task per rank; returns a line, or "".

    Nothing is changed where a launcher has set RANK or WORLD_SIZE; MASTER_ADDR and MASTER_PORT are kept.

    Raises:
        UserError: SLURM's variables contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ or not _in_step(environ):
        return ""
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None or tasks == 1:
        return ""
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    node = _number(environ, "SLURM_NODEID") or 0
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    if rank is None or local_rank is None:
        raise UserError("SLURM_NTASKS is set, but SLURM_PROCID or SLURM_LOCALID is not: start with srun")
    counts = _tasks_per_node(environ) or [-(-tasks // nodes)] * nodes
    if rank >= tasks or node >= len(counts) or local_rank >= counts[node]:
        raise UserError(
            f"SLURM's variables contradict each other: task {rank} of {tasks} (SLURM_PROCID, SLURM_NTASKS) "
            f"is number {local_rank} of node {node} (SLURM_LOCALID, _NODEID), with tasks per node {counts}"
        )
    values = {
        "RANK": rank, "WORLD_SIZE": tasks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": counts[node],
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
    }  # fmt: skip
    environ.update({name: str(value) for name, value in values.items()})
    environ.setdefault("MASTER_ADDR", _first_host(environ) or "127.0.0.1")
    environ.setdefault("MASTER_PORT", str(_port(environ)))
    return (
        f"SLURM: {tasks} ranks on {nodes} node(s), one per task; they meet at {environ['MASTER_ADDR']}:"
        f"{environ['MASTER_PORT']}"
    )


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process, one of several tasks."""
    return _in_step(environ) and (_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1) > 1


def expand_hosts(text: str) -> list[str]:
    """The names of a SLURM node list: ``a[003-005,9]-ib,b`` -> a003-ib, a004-ib, a005-ib, a9-ib, b.

    Raises:
        UserError: the list cannot be read.
    """
    hosts: list[str] = []
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    for word in words if ",".join(words) == text else ():
        parts = re.split(r"\[([^\[\]]*)\]", word)  # text, range, text, range, ..., text
        names = [parts[0]]
        for ranges, after in zip(parts[1::2], parts[2::2], strict=True):
            names = [f"{name}{number}{after}" for name in names for number in _numbers(ranges, text)]
        hosts += names
    if not hosts or not all(re.fullmatch(r"[\w.:-]+", host) for host in hosts):
        raise UserError(f"SLURM's node list {text!r} cannot be read; give --master-addr")
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """``003-005,9`` -> 003, 004, 005, 9."""
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise UserError(f"SLURM's node list {text!r} cannot be read; give --master-addr")
        first, last = match[1], match[2] or match[1]
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def _in_step(environ: Mapping[str, str]) -> bool:
    step = _first(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return (
        step is not None and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ
    )


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """``2(x3),1`` -> [2, 2, 2, 1]; empty if SLURM does not say."""
    text = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(environ: Mapping[str, str]) -> str:
    text = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_hosts(text)[0] if text else ""


def _port(environ: Mapping[str, str]) -> int:
    """The same on all nodes, and another one for another job or step that may share a node."""
    job, step = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID"), _number(environ, "SLURM_STEP_ID")
    return _PORTS[((job or 0) + 1009 * (step or 0)) % len(_PORTS)]


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    text = _first(environ, *names)
    return int(text) if text is not None and text.isdigit() else None


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
