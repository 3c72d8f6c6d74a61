"""``shardyard serve``: an OpenAI-compatible HTTP service of what was trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardyard.cli.convert_options import count
from shardyard.cli.inference_options import (
    add_model_options,
    choice_of,
    number,
    parse_verb,
    verb_parser,
    whole,
)
from shardyard.cli.inference_ranks import RANKS_HELP, run_verb, with_model
from shardyard.errors import UserError
from shardyard.infer.serve.front import Front, bind
from shardyard.infer.serve.limits import Limits

if TYPE_CHECKING:
    import socket

    from shardyard.infer.model import Opened
    from shardyard.infer.opening import Choice

DESCRIPTION = """\
usage: shardyard serve --model PATH [--port N] [--host ADDRESS] [options]

Answers HTTP requests in the form of OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions, and
/health, /metrics and /openapi.json for its operator. It listens on this machine alone unless --host says
otherwise. Ctrl-C or SIGTERM ends it: requests under way may end first, new ones are refused.
"""
KEY_VARIABLE = "SHARDYARD_API_KEY"
_DAY = 86400.0
_PORTS = 65535


@dataclass(frozen=True)
class Job:
    """What the words of the verb ask for."""

    choice: Choice
    limits: Limits
    name: str | None
    front: Front


def serve(argv: Sequence[str]) -> int:
    """Run the verb: 0 when it was told to end, 1 when the model has stopped working.

    Raises:
        UserError: a wrong option or model, or a port in use.
    """
    code = run_verb("serve", argv, read_serve, run_serve)
    # of ranks that were started: the launcher was told to end, and all of them have
    return 0 if code in (128 + signal.SIGTERM, 128 + signal.SIGINT) else code


def read_serve(words: Sequence[str]) -> Job | None:
    """The job of the words; None when they asked for the help."""
    options = parse_verb(_parser(), words)
    if options is None:
        return None
    if options.port > _PORTS:
        raise UserError(f"--port {options.port}: ports end at {_PORTS}")
    limits = Limits(
        options.max_running, options.max_waiting, int(options.max_body_mib * 2**20),
        options.max_prompt_tokens, options.max_new_tokens, options.request_timeout,
    )  # fmt: skip
    front = Front(
        options.host, options.port, _key(options.api_key), tuple(options.allow_origin), options.access_log,
        options.grace,
    )  # fmt: skip
    return Job(choice_of(options), limits, options.served_model_name, front)


def _key(given: str | None) -> str | None:
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    where = KEY_VARIABLE if given is None else "--api-key"
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise UserError(f"{where}: a key is printable ASCII text and not empty; leave it out for none")
    return key if key is None else key.strip()


def _parser() -> Any:
    parser = verb_parser("serve", DESCRIPTION)
    parser.epilog = RANKS_HELP
    add = parser.add_argument_group("service").add_argument
    add("--port", type=whole, default=8000, metavar="N", help="default 8000; 0: a free one, which is printed")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1; 0.0.0.0: every network")
    add(
        "--api-key", metavar="KEY",
        help=f"clients have to send it; better by {KEY_VARIABLE}: the list of processes shows words",
    )  # fmt: skip
    add(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: its folder's or run's name)",
    )
    add(
        "--allow-origin", action="append", default=[], metavar="URL",
        help="web pages of this origin may call the service; several times for several",
    )  # fmt: skip
    add("--access-log", action="store_true", help="a line for each request; never its text")
    add(
        "--grace",
        type=number(0, _DAY),
        default=30.0,
        metavar="S",
        help="for requests at the end (default 30)",
    )
    add = parser.add_argument_group("limits").add_argument
    add("--max-running", type=count, default=32, metavar="N", help="answers at a time (default 32)")
    add("--max-waiting", type=whole, default=128, metavar="N", help="answers in the queue (default 128)")
    add(
        "--max-body-mib", type=number(0, 1024, above=True), default=4.0, metavar="N",
        help="of a request (default 4)",
    )  # fmt: skip
    add("--max-prompt-tokens", type=count, metavar="N", help="default: what the context holds")
    add(
        "--max-new-tokens", type=count, metavar="N", help="most that a request may ask for; default: the same"
    )
    add(
        "--request-timeout", type=number(0, _DAY, above=True), default=600.0, metavar="S",
        help="from a request to the end of its answer (default 600)",
    )  # fmt: skip
    add_model_options(parser)
    return parser


def run_serve(job: Job) -> int:
    """Serve, on every rank of the run; rank 0 has the socket."""
    listener = None
    if os.environ.get("RANK", "0") == "0":
        listener = bind(job.front)  # before the model is loaded
    else:
        for number_ in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number_, signal.SIG_IGN)  # it ends when rank 0 does
    return with_model(job.choice, lambda opened: _serve(job, opened, listener))


def _serve(job: Job, opened: Opened, listener: socket.socket | None) -> int:
    from shardyard.infer.engines import with_engine
    from shardyard.infer.serve.server import run
    from shardyard.infer.serve.service import Service
    from shardyard.infer.serve.subject import Subject
    from shardyard.infer.types import Engine

    def work(engine: Engine) -> int:
        assert listener is not None
        subject = Subject(opened, job.name or opened.found.lasting_name, job.limits, engine.context_length)
        return run(Service(engine, subject, job.limits), job.front, listener)

    code = with_engine(opened, work, max_running=job.limits.max_running)
    return 0 if code is None else code
