"""lm-eval's view of an opened model. Needs lm-eval.

To lm-eval there is one rank; how requests are divided is the crew's business. Tokens, windows and truncation
are those of lm-eval's own Hugging Face backend, so its scores are ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]

from shardyard.errors import UserError
from shardyard.evaluate.crew import Crew, Prompt, Score
from shardyard.infer.model import Opened
from shardyard.infer.types import Sampling

logger = logging.getLogger("shardyard.evaluate")

_DEFAULT_TOKENS = 256
"""Of an answer whose task does not say how long it may be, as in lm-eval."""
_SAMPLING = {"top_p", "top_k", "min_p", "repetition_penalty"}


class OpenedLM(TemplateLM):
    """``seed``: of sampled answers; each request has its own. ``overrides``: of tasks' generation settings.

    ``max_length``: tokens of context and continuation, where fewer than the model's are wanted.
    """

    def __init__(
        self,
        opened: Opened,
        crew: Crew,
        chat: Any = None,
        *,
        max_length: int | None = None,
        seed: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = opened.tokenizer
        self._opened, self._crew, self._chat, self._seed = opened, crew, chat, seed
        self._overrides = dict(overrides or {})
        self.max_length = min(max_length or opened.context_length, opened.context_length)
        self.empty_continuations = 0
        """Continuations without a token: their log-likelihood is 0."""
        self.truncated = 0
        """Requests whose context was cut from the left."""

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def device(self) -> Any:
        return self._opened.device.torch_device

    @property
    def tokenizer_name(self) -> str:
        return self._opened.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; without special tokens in front if it begins with one, as a rendered chat does."""
        options: dict[str, Any] = {}
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif "gemma" in str(self._opened.config.model_type):
            options["add_special_tokens"] = True
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        return self.tokenizer.encode(string, **options)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """One (log-probability, is greedy) for each request of (context, continuation)."""
        kept = [request for request in requests if request.args[1] != ""]
        self.empty_continuations += len(requests) - len(kept)
        found = iter(super().loglikelihood(kept, disable_tqdm=True))
        return [next(found) if request.args[1] != "" else (0.0, True) for request in requests]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Score]:
        return self._crew.score([self._fitted(context, more) for _, context, more in requests])

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair, cut from the left to what the model can hold."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens does not fit into {self.max_length}; ask a "
                "model with a longer context, or leave the task out"
            )
        room = self.max_length + 1 - len(continuation)
        self.truncated += len(context) > room
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows that do not overlap; 0 of an empty one."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            self.empty_continuations += not ids
            for window in utils.get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            ):
                windows.append(utils.make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._crew.score(windows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each (context, settings)."""
        return self._crew.generate([self._prompt(at, request) for at, request in enumerate(requests)])

    def _prompt(self, number: int, request: Instance) -> Prompt:
        context, settings = request.args
        told: dict[str, Any] = dict(normalize_gen_kwargs({**settings, **self._overrides}, _DEFAULT_TOKENS))
        limit = told.pop("max_gen_toks")
        stop = tuple(text for text in told.pop("until") if text)
        if limit >= self.max_length:
            raise UserError(
                f"{request.task_name}: an answer of {limit} tokens leaves no room for a question in the "
                f"model's context of {self.max_length}"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        self.truncated += len(ids) > self.max_length - limit
        return Prompt(
            tuple(ids[-(self.max_length - limit) :]), self._sampling(told, limit, number, request), stop
        )

    def _sampling(self, told: dict[str, Any], limit: int, number: int, request: Instance) -> Sampling:
        samples, temperature = told.pop("do_sample"), float(told.pop("temperature", None) or 0.0)
        if unknown := [key for key in told if key not in _SAMPLING]:
            raise UserError(f"{request.task_name}: generation_kwargs.{unknown[0]} is not done here")
        options = {key: value for key, value in told.items() if value is not None}
        if samples:
            options |= {"temperature": temperature or 1.0, "seed": self._seed + number}
        else:
            options = {key: value for key, value in options.items() if key == "repetition_penalty"}
        try:
            return Sampling(max_new_tokens=limit, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"{request.task_name}: generation_kwargs: {error}") from error

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation by the model's chat template, in our sandbox."""
        return self._chat.text(chat_history, continue_final=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template if chat_template else None
