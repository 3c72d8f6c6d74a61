"""What runs in each rank, and how a rank ends when something is wrong.

A fault on one rank must end all of them soon, with the cause named once. So a rank that fails prints one
block and leaves at once, without the tear-down that would wait for the others; a rank that merely lost
another one waits a moment, so that the launcher sees the rank at fault first and ends the rest.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from shardyard.allocator import tune_for_tensors
from shardyard.cli import slurm
from shardyard.errors import EXIT_SAVED, UserError

_EXIT_FAULT, _EXIT_USER_ERROR = 1, 2
_LAUNCHER_SECONDS = 10.0
"""How long a rank that lost another one leaves the word to the launcher."""
_PARENT_POLL_SECONDS = 1.0
LOST_CONTACT = "lost contact with another rank"
"""Begins the cause of a rank that failed because another one was gone."""
_LOST_CONTACT_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
)


def run_rank(argv: Sequence[str]) -> int:
    """Train in this process as one rank; ``argv`` is the YAML and the overrides.

    The process ends here: with exit code 0 when the run is complete, 75 when it was asked to stop and has
    saved, 2 for the user's mistake, 130 for Ctrl-C and 1 for everything else.
    """
    return guard(lambda: _train(argv))


def guard(work: Callable[[], int]) -> int:
    """Run ``work`` as this rank's job under the rules of this module."""
    faulthandler.enable()
    _end_with_launcher()
    try:
        code = work()
        # Done: the interpreter's own tear-down now and then aborts in a thread of a destroyed process group.
        _leave(code, "")
    except UserError as error:
        _leave(_EXIT_USER_ERROR, *_user_error(error))
    except KeyboardInterrupt:
        _leave(130, f"rank {_rank()} interrupted" if _rank() == 0 else "")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        _leave(_EXIT_FAULT, *_fault(error))


def _train(argv: Sequence[str]) -> int:
    from shardyard.config import load_config
    from shardyard.monitor import setup_logging

    loaded = load_config(argv)
    said = slurm.adopt_rank(os.environ)
    setup_logging(_rank())
    if said:
        logging.getLogger("shardyard").info(said)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    logging.getLogger("shardyard").info("%d rank(s) have started and load torch and transformers", ranks)
    tune_for_tensors()
    from shardyard.device import peers
    from shardyard.train import run

    peers.when_lost(_leave_for_lost_peer)

    return run(loaded, convert=_convert)


def _convert(source: Path, config_dir: Path, target: Path) -> None:
    """A Megatron-core folder, from which a run begins, as a Hugging Face one."""
    from shardyard.convert.job import convert_to_hf

    convert_to_hf(source, config_dir, target)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _user_error(error: UserError) -> tuple[str, str]:
    """(text to print, cause for the launcher). Of the ranks that see the same mistake only one speaks.

    Rank 0 speaks at once. The others follow one by one, in case that the mistake is theirs alone; the first
    to end makes the launcher end the rest.
    """
    _let_rank_0_speak()
    return f"error: {error}", str(error)


def _let_rank_0_speak() -> None:
    if _rank() != 0:
        time.sleep(3.0 + 0.5 * int(os.environ.get("LOCAL_RANK", "0")))


def _fault(error: BaseException) -> tuple[str, str]:
    """(text to print, cause for the launcher); waits first if another rank is at fault."""
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))  # "in step 3", from the trainer
    cause = f"{type(error).__name__}: {error}"
    head = f"rank {_rank()} ({socket.gethostname()}, pid {os.getpid()})"
    if _is_on_every_rank(error):
        _let_rank_0_speak()
        return f"{head}: {error}", str(error)
    if _lost_contact(error):
        if _was_asked_to_stop():  # the launcher is ending this rank: there is nothing to wait for
            return "", ""
        cause = f"{LOST_CONTACT}{where}: {_who_is_gone() or cause}"
        return f"{head} {cause}", cause
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{head} failed{where}: {cause}\n{trace}", f"failed{where}: {cause}"


def _who_is_gone() -> str:
    """What the watch over other machines says, after the time that is left to this machine's launcher."""
    peers = sys.modules.get("shardyard.device.peers")
    watch = peers.current() if peers is not None else None
    if watch is None:
        time.sleep(_LAUNCHER_SECONDS)
        return ""
    told = watch.explain(_LAUNCHER_SECONDS)
    _let_first_rank_here_speak()
    return told


def _leave_for_lost_peer(verdict: str) -> NoReturn:
    """End this rank from the watch's thread: its own work may wait in a collective for ever."""
    _let_first_rank_here_speak()
    cause = f"{LOST_CONTACT}: {verdict}"
    _leave(_EXIT_FAULT, f"rank {_rank()} ({socket.gethostname()}, pid {os.getpid()}) {cause}", cause)


def _let_first_rank_here_speak() -> None:
    """The launcher ends the others of this machine when the first has ended."""
    time.sleep(0.5 * int(os.environ.get("LOCAL_RANK", "0")))


def _was_asked_to_stop() -> bool:
    module = sys.modules.get("shardyard.device.stop_signal")
    return module is not None and module.stop_asked() is not None


def _is_on_every_rank(error: BaseException) -> bool:
    return bool(getattr(error, "on_every_rank", False))


def _lost_contact(error: BaseException) -> bool:
    dist = sys.modules.get("torch.distributed")  # not loaded: no contact to lose
    if dist is not None and isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST_CONTACT_WORDS)


def _leave(code: int, text: str, cause: str = "") -> NoReturn:
    """End this process now, without tear-down or exit handlers that could wait for another rank."""
    if cause:
        _tell_launcher(cause)
    if code not in (0, EXIT_SAVED):
        _tell_other_machines(cause)
    logging.shutdown()
    sys.stdout.flush()
    if text:
        print(text, file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)


def _tell_launcher(cause: str) -> None:
    """Write the cause where torch's launcher reads it, in its format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": cause, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, file)


def _tell_other_machines(cause: str) -> None:
    """One that merely lost another rank says that it leaves, and blames nobody."""
    peers = sys.modules.get("shardyard.device.peers")
    watch = peers.current() if peers is not None else None
    if watch is not None:
        watch.finish("left", "" if cause.startswith(LOST_CONTACT) else cause)


def _end_with_launcher() -> None:
    """End this rank when its launcher is killed: without it nobody would end a rank that waits for ever."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_SECONDS)
        print(f"rank {_rank()}: the launcher is gone", file=sys.stderr, flush=True)
        os._exit(_EXIT_FAULT)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
