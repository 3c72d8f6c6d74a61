"""The model that is served: requests of the API -> requests of an engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from shardyard.errors import UserError
from shardyard.infer.asked import Asked as Settings
from shardyard.infer.asked import sampling_of
from shardyard.infer.chat_format import ChatFormat
from shardyard.infer.openai_messages import ChatFault
from shardyard.infer.plan import Side
from shardyard.infer.replies import ReplyFormat
from shardyard.infer.serve.asked import Asked, ChatRequest, CompletionRequest
from shardyard.infer.serve.errors import ApiFault, invalid
from shardyard.infer.serve.limits import Limits
from shardyard.infer.types import Request, Sampling

_COMPLETION_TOKENS = 16
"""OpenAI's length of a completion that does not say."""
_SEEDS = 2**63


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted. ``replies``: how the model writes thoughts and calls, in a chat."""

    request: Request
    stop: tuple[str, ...]
    replies: ReplyFormat | None = None
    in_thought: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    echo: str = ""


class Subject:
    """A model under the name that clients know. ``context_length``: the engine's.

    Prompts are made on one thread of its own, with a tokenizer of its own: answers are decoded meanwhile.
    """

    def __init__(self, side: Side, name: str, limits: Limits, context_length: int) -> None:
        self.name = name
        self.tokenizer = side.tokenizer
        self.context_length = context_length
        self._limits = limits
        self._stop_ids, self._defaults = side.stop_ids, side.defaults
        section = dict((side.run or {}).get("inference") or {})
        self._system = section.get("system")
        self._section: Mapping[str, Any] = {
            key: value for key, value in section.items() if key not in ("num_beams", "logprobs")
        }
        own: Any = replace(side, tokenizer=copy.deepcopy(side.tokenizer))  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
        self._tokenize = own.tokenizer
        self._chat = ChatFormat.of(own) if own.tokenizer.chat_template else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="shardyard-prompts")

    def chat(self, asked: ChatRequest) -> list[Ask]:
        """The answers to a conversation: ``n`` of them.

        Raises:
            ApiFault: 400.
        """
        chat = self._chat
        if chat is None:
            raise invalid(
                "messages", "This model has no chat template; use /v1/completions.", "no_chat_template"
            )
        offered = asked.tools if asked.tool_choice != "none" else None
        try:
            conversation = chat.from_openai(asked.messages, offered or None)
            if conversation.system is None and self._system:
                conversation = replace(conversation, system=self._system)
            prompt = chat.prompt(
                conversation,
                enable_thinking=_thinking(asked),
                continue_final=bool(asked.continue_final_message),
            )
        except ChatFault as fault:
            raise invalid(fault.field, f"Invalid '{fault.field}': {fault.problem}.") from None
        most = asked.max_completion_tokens or asked.max_tokens
        if asked.max_completion_tokens and asked.max_tokens not in (None, asked.max_completion_tokens):
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them.")
        if asked.top_logprobs and not asked.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
        likeliest = (asked.top_logprobs or 0) if asked.logprobs else None
        ids = self._checked(prompt.ids, "messages")
        sampling, stop = self._sampling(asked, most, likeliest, ids, chat.stop_ids)
        ask = Ask(
            Request(ids, sampling), stop + chat.stop_texts,
            chat.replies if conversation.tools else replace(chat.replies, calls=None),
            prompt.in_thought, conversation.tools,
        )  # fmt: skip
        return _seeded(ask, asked.n or 1, 0)

    def completions(self, asked: CompletionRequest) -> list[Ask]:
        """The answers to each of the prompts in turn: ``n`` of them to each.

        Raises:
            ApiFault: 400.
        """
        n = asked.n or 1
        if asked.best_of not in (None, n):
            raise invalid("best_of", "best_of is not done here; ask for n answers and choose.")
        if asked.echo and asked.logprobs is not None:
            raise invalid(
                "echo", "echo with logprobs is not done here: a prompt's own logprobs are not computed."
            )
        asks: list[Ask] = []
        for prompt in asked.prompts:
            given = self._tokenize(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            ids = self._checked(given, "prompt")
            most = asked.max_tokens or min(
                _COMPLETION_TOKENS, self._limits.max_new_tokens or _COMPLETION_TOKENS
            )
            sampling, stop = self._sampling(asked, most, asked.logprobs, ids, frozenset())
            echo = (prompt if isinstance(prompt, str) else self._decoded(ids)) if asked.echo else ""
            asks += _seeded(Ask(Request(ids, sampling), stop, echo=echo), n, len(asks))
        return asks

    def _decoded(self, ids: tuple[int, ...]) -> str:
        return self._tokenize.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _checked(self, ids: list[int], param: str) -> tuple[int, ...]:
        most = min(self.context_length - 1, self._limits.max_prompt_tokens or self.context_length)
        if not ids:
            raise invalid(param, "The prompt is empty: it has no token.")
        if len(ids) > most:
            raise ApiFault(
                400,
                f"The prompt has {len(ids)} tokens, and this server takes at most {most}: prompt and answer "
                f"share a context of {self.context_length} tokens.",
                param=param, code="context_length_exceeded",
            )  # fmt: skip
        return tuple(ids)

    def _sampling(
        self, asked: Asked, most: int | None, logprobs: int | None, ids: tuple[int, ...], more: frozenset[int]
    ) -> tuple[Sampling, tuple[str, ...]]:
        bound = self._limits.max_new_tokens
        if most is not None and bound is not None and most > bound:
            raise invalid(
                "max_tokens", f"max_tokens is too large: {most}; this server gives at most {bound}."
            )
        wanted = Settings(
            max_new_tokens=most, temperature=asked.temperature, top_p=asked.top_p,
            top_k=0 if asked.top_k == -1 else asked.top_k, min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty, presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty, stop=asked.stops, logprobs=logprobs,
            seed=None if asked.seed is None else asked.seed % _SEEDS,
        )  # fmt: skip
        try:
            merged, sampling = sampling_of(wanted, self._section, self._defaults, self._stop_ids | more)
        except UserError as error:
            raise ApiFault(400, str(error)) from None
        room = self.context_length - len(ids)
        return replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, room, bound or room),
            logit_bias={int(token): value for token, value in (asked.logit_bias or {}).items()},
        ), merged.stop or ()


def _thinking(asked: ChatRequest) -> bool | None:
    ours, theirs = asked.enable_thinking, (asked.chat_template_kwargs or _NOTHING).enable_thinking
    if None not in (ours, theirs) and ours != theirs:
        raise invalid("enable_thinking", "enable_thinking and chat_template_kwargs.enable_thinking differ.")
    return theirs if ours is None else ours


class _Nothing:
    enable_thinking = None


_NOTHING = _Nothing()


def _seeded(ask: Ask, n: int, before: int) -> list[Ask]:
    """``n`` answers, each by a seed of its own, so that they differ and can be had again."""
    request, seed = ask.request, ask.request.sampling.seed
    if seed is None:
        return [ask] * n
    return [
        replace(
            ask,
            request=replace(
                request, sampling=replace(request.sampling, seed=(seed + before + number) % _SEEDS)
            ),
        )
        for number in range(n)
    ]
