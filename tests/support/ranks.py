"""Run a function on several ranks, each in a process of its own, fast enough for hundreds of tests.

One helper process (multiprocessing's forkserver) imports torch and transformers once per session, with one
thread. Each call forks its ranks from it, which costs milliseconds, so no test sees the caches, groups or
random state of another, and a hung rank is just killed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = [
    "pytest",
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.conversion_mapping",
    "transformers.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.glm4_moe.modeling_glm4_moe",
    "transformers.tokenization_utils_tokenizers",
]
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
GRACE_S = 5.0
"""How long the other ranks may take to end once one has failed; they are killed after it."""


class RankFailure(AssertionError):
    """At least one rank failed.

    ``rank`` is the first that reported; ``causes`` holds, by rank, the exceptions that could be pickled, and
    ``cause`` that of ``rank``.
    """

    def __init__(self, rank: int, message: str, causes: dict[int, BaseException]):
        super().__init__(message)
        self.rank = rank
        self.cause = causes.get(rank)
        self.causes = causes


@dataclass(frozen=True)
class _Job:
    """What one rank is told. A function travels as (module, file, qualified name), arguments as a pickle."""

    rank: int
    world_size: int
    store: str
    port: int
    init_process_group: bool
    sys_path: list[str]
    module: str
    file: str
    qualname: str
    arguments: bytes


@dataclass(frozen=True)
class _Answer:
    value: bytes | None = None
    error: str | None = None
    cause: bytes | None = None


class RankPool:
    """Starts ranks on demand from the preloaded helper process."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        with _environment(SERVER_ENVIRONMENT):
            forkserver.ensure_running()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        init_process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return what each rank returned, by rank.

        ``fn`` is a top-level function; arguments and results are picklable (tensors as plain CPU tensors).
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; a gloo process
        group (of one rank too) is made before and destroyed after, unless ``init_process_group`` is false.

        Raises RankFailure if a rank raises, dies, or is not done after ``timeout_s`` seconds.
        """
        arguments = pickle.dumps((args, kwargs))
        try:
            return self._run(world_size, fn, arguments, timeout_s, init_process_group)
        except RankFailure as failure:
            # Before ``fn`` began: gloo's ranks do not meet when a stranger connects to one of its ports.
            if not init_process_group or "connectFullMesh failed" not in str(failure):
                raise
        return self._run(world_size, fn, arguments, timeout_s, init_process_group)

    def _run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        arguments: bytes,
        timeout_s: float,
        init_process_group: bool,
    ) -> list[Any]:
        module = sys.modules[fn.__module__]
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            processes: list[BaseProcess] = []
            pipes: list[Any] = []
            port = _free_port()
            for rank in range(world_size):
                job = _Job(
                    rank, world_size, f"{folder}/store", port, init_process_group, list(sys.path),
                    fn.__module__, str(module.__file__), fn.__qualname__, arguments,
                )  # fmt: skip
                mine, theirs = self._context.Pipe(duplex=False)
                process = self._context.Process(target=_rank_main, args=(job, theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            try:
                return _collect(processes, pipes, timeout_s)
            finally:
                for process in processes:
                    if process.is_alive():
                        process.kill()
                for process, pipe in zip(processes, pipes, strict=True):
                    process.join()
                    pipe.close()


def _collect(processes: list[BaseProcess], pipes: list[Any], timeout_s: float) -> list[Any]:
    """Wait for every rank's answer; on the first failure give the others GRACE_S seconds, then report all."""
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_s
    failed: list[int] = []
    while len(answers) < len(pipes):
        waiting = [pipes[rank] for rank in range(len(pipes)) if rank not in answers]
        ready = connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                processes[rank].join(GRACE_S)
                code = processes[rank].exitcode
                answers[rank] = _Answer(error=f"ended without an answer, exit code {code}")
            if answers[rank].error is not None:
                if not failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failed.append(rank)
    silent = [rank for rank in range(len(pipes)) if rank not in answers]
    if failed or silent:
        _raise_failure(processes, answers, failed, silent, timeout_s)
    values = [answers[rank].value for rank in range(len(pipes))]
    return [pickle.loads(value) for value in values if value is not None]


def _raise_failure(
    processes: list[BaseProcess],
    answers: dict[int, _Answer],
    failed: list[int],
    silent: list[int],
    timeout_s: float,
) -> None:
    lines = [f"rank {rank}: {answers[rank].error}" for rank in failed]
    if silent and not failed:
        lines.append(f"ranks {silent} gave no answer in {timeout_s:g} s; their stacks are on stderr")
        for rank in silent:
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
    elif silent:
        lines.append(f"ranks {silent} were killed, {GRACE_S:g} s after the first failure")
    pickled = {rank: answer.cause for rank, answer in answers.items()}
    causes = {rank: pickle.loads(cause) for rank, cause in pickled.items() if cause is not None}
    first = failed[0] if failed else silent[0]
    raise RankFailure(first, "\n".join(lines), causes)


def _rank_main(job: _Job, pipe: Any) -> None:
    """One rank: set up, call, answer."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    _die_with_parent()
    try:
        answer = _Answer(value=pickle.dumps(_call(job)))
    except BaseException as error:
        answer = _Answer(error="".join(traceback.format_exception(error)), cause=_pickled(error))
    pipe.send(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no exit handlers: a failed rank may hold a process group that would wait for its peers


def _die_with_parent() -> None:
    """End with the helper process, which ends with pytest: a killed run leaves no rank behind that spins."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _call(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port),
    )  # fmt: skip
    torch.set_num_threads(1)
    sys.path[:] = job.sys_path
    fn: Any = _module(job)
    for part in job.qualname.split("."):
        fn = getattr(fn, part)
    args, kwargs = pickle.loads(job.arguments)
    if not job.init_process_group:
        return fn(*args, **kwargs)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.world_size
    )
    value = fn(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _module(job: _Job) -> ModuleType:
    """The module of the function, by its file: two test files may share a base name."""
    loaded = sys.modules.get(job.module)
    if loaded is not None and getattr(loaded, "__file__", None) == job.file:
        return loaded
    if job.module.split(".")[0] in ("support", "shardyard"):
        return importlib.import_module(job.module)
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None and spec.loader is not None, f"no module {job.module} at {job.file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    sys.path.insert(0, str(Path(job.file).parent))
    spec.loader.exec_module(module)
    return module


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception that cannot travel still arrives as its text
        return None
    return data


def _free_port() -> int:
    """A port below those that the system gives to outgoing connections, so that none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the duration of a block; the helper process inherits them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
