"""vLLM and SGLang: their own offline engines, where they are installed, on a folder in Hugging Face's form.

Prompts are rendered and tokenised here, as for our own engine; the other one gets token ids and sampling, and
its token ids become text here again. Written by the two projects' documented interfaces (vllm.LLM.generate,
sglang.Engine.generate) and tested with stand-ins of them, not with the packages themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from shardyard.errors import UserError
from shardyard.infer.answers import Answer, text_stream
from shardyard.infer.plan import Task
from shardyard.infer.text_side import TextSide
from shardyard.infer.types import Token

_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def require(backend: str) -> Any:
    """The engine's package.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(backend)
    except ImportError as error:
        raise UserError(
            f"infer_backend {backend}: the package cannot be imported ({error}); pip install {backend}, or "
            "leave infer_backend at huggingface"
        ) from error


class OtherEngine:
    """One of the two engines over a folder; a context manager. ``tp``: devices that share the model."""

    def __init__(
        self,
        backend: str,
        side: TextSide,
        *,
        dtype: str = "auto",
        tp: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        package = require(backend)
        self._backend, self._side = backend, side
        shared: dict[str, Any] = dict(dtype=_DTYPES[dtype], trust_remote_code=trust_remote_code)
        if backend == "vllm":
            self._params = package.SamplingParams
            self._engine = package.LLM(
                model=side.folder, tensor_parallel_size=tp, max_model_len=side.context_length, **shared
            )
        else:
            self._engine = package.Engine(
                model_path=side.folder, tp_size=tp, context_length=side.context_length,
                skip_tokenizer_init=True, **shared,
            )  # fmt: skip

    def __enter__(self) -> OtherEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._backend == "sglang":
            self._engine.shutdown()

    def answers(self, tasks: Sequence[Task], *, at_a_time: int = 256) -> Iterator[Answer]:
        """The answer of each task, in order.

        Raises:
            UserError: a task that the engine cannot do.
        """
        for task in tasks:
            self._check(task)
        ask = self._ask_vllm if self._backend == "vllm" else self._ask_sglang
        for start in range(0, len(tasks), at_a_time):
            part = tasks[start : start + at_a_time]
            for task, (ids, reason, tokens) in zip(part, ask(part), strict=True):
                yield self._answer(task, ids, reason, tokens)

    def _check(self, task: Task) -> None:
        sampling = task.request.sampling
        if task.num_beams > 1:
            raise UserError(
                f"{task.row.where}: num_beams: beams are searched by infer_backend huggingface only"
            )
        if self._backend == "sglang" and sampling.logprobs:
            raise UserError(f"{task.row.where}: logprobs: infer_backend huggingface or vllm gives them")
        if self._backend == "sglang" and not sampling.is_greedy and task.row.asked.seed is not None:
            raise UserError(f"{task.row.where}: seed: infer_backend huggingface or vllm keeps it")

    def _ask_vllm(self, tasks: Sequence[Task]) -> list[tuple[list[int], str, list[Token]]]:
        prompts = [{"prompt_token_ids": list(task.request.prompt_ids)} for task in tasks]
        found = self._engine.generate(prompts, [self._vllm_params(task) for task in tasks], use_tqdm=False)
        return [
            self._of_vllm(one.outputs[0], task.request.sampling.top_logprobs)
            for one, task in zip(found, tasks, strict=True)
        ]

    def _vllm_params(self, task: Task) -> Any:
        sampling = task.request.sampling
        return self._params(
            **_common(task), seed=None if sampling.is_greedy else sampling.seed, detokenize=False,
            max_tokens=self._room(task), logprobs=sampling.top_logprobs if sampling.logprobs else None,
        )  # fmt: skip

    @staticmethod
    def _of_vllm(output: Any, top: int) -> tuple[list[int], str, list[Token]]:
        ids = list(output.token_ids)
        if not output.logprobs:
            return ids, output.finish_reason, [Token(token) for token in ids]
        tokens = []
        for token, told in zip(ids, output.logprobs, strict=True):
            ranked = sorted(told.items(), key=lambda item: item[1].rank)
            kept = [(other, value.logprob) for other, value in ranked if value.rank <= top]
            tokens.append(Token(token, told[token].logprob, tuple(kept)))
        return ids, output.finish_reason, tokens

    def _ask_sglang(self, tasks: Sequence[Task]) -> list[tuple[list[int], str, list[Token]]]:
        found = self._engine.generate(
            input_ids=[list(task.request.prompt_ids) for task in tasks],
            sampling_params=[{**_common(task), "max_new_tokens": self._room(task)} for task in tasks],
        )
        return [
            (ids := list(one["output_ids"]), one["meta_info"]["finish_reason"]["type"],
             [Token(token) for token in ids])
            for one in found
        ]  # fmt: skip

    def _room(self, task: Task) -> int:
        room = self._side.context_length - len(task.request.prompt_ids)
        return min(task.request.sampling.max_new_tokens, room)

    def _answer(self, task: Task, ids: list[int], reason: str, tokens: list[Token]) -> Answer:
        """Text by our own rules: both engines are told no stop texts, which are found here."""
        if reason not in ("stop", "length"):
            return Answer(tokens=tokens, finish_reason="error", error=f"{self._backend} says {reason}")
        stream, text = text_stream(task, self._side.tokenizer), ""
        for place, token in enumerate(ids):
            if token in task.request.sampling.stop_ids:
                break
            text += stream.feed(token)
            if stream.finished:
                return Answer(text, tokens[: place + 1], "stop")
        return Answer(text + stream.flush(), tokens, reason)


def _common(task: Task) -> dict[str, Any]:
    """What both engines call alike."""
    sampling = task.request.sampling
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sorted(sampling.stop_ids),
    }  # fmt: skip
