"""The named template ``qwen3``: the text that MindSpeed-LLM's template of this name writes.

It differs from Qwen3's own chat template in keeping the thoughts of earlier replies, in giving every reply
without a thought an empty one, and in writing the tools after an empty system text if there is no other. A
conversation is one sample, whose replies are all trained, with ``<|im_end|>`` and the line end after it.

``enable_thinking``:

- true: a reply without ``<think>`` and ``</think>`` gets the empty thought in front, trained; others stay;
- false: thoughts are removed from all replies, and the empty thought ends each prompt, not trained;
- null: thoughts are left; the prompt of a reply without one ends with the empty thought, not trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.base import Turn, without_thoughts
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.data.types import Conversation, Message, ToolCall

MARKERS = ("<|im_start|>", "<|im_end|>")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class Qwen3Template:
    """See the module. Pieces are tokenised apart where a reply begins and ends, as generation meets them."""

    name = "qwen3"
    cut: Literal["each_turn", "end"] = "each_turn"

    def __init__(
        self, tokens: TextTokenizer, *, enable_thinking: bool | None, default_system: str | None
    ) -> None:
        self._tokens = tokens
        self._enable_thinking = enable_thinking
        self._default_system = default_system

    def encode(self, conversation: Conversation) -> list[list[Turn]]:
        """One sample. Raises NotUsable for a reply that is nothing but a thought which is to be removed."""
        conversation, hidden = self._tokens.hide(conversation)
        return [
            [
                Turn(self._tokens.ids(prompt, hidden), self._tokens.ids(reply, hidden))
                for prompt, reply in self.texts(conversation)
            ]
        ]

    def texts(self, conversation: Conversation) -> list[tuple[str, str]]:
        """(prompt, reply) of each turn; the sample's text is all of them end to end."""
        pairs: list[tuple[str, str]] = []
        prompt = self._system(conversation)
        results: list[str] = []
        for turn in conversation.turns:
            if turn.role == "tool":
                results.append(turn.content)
                continue
            if turn.role == "user":
                prompt += f"<|im_start|>user\n{turn.content}<|im_end|>\n"
                continue
            if results:
                prompt += f"<|im_start|>user\n{_tool_responses(results)}<|im_end|>\n"
            thought_given, reply = self._reply(turn)
            pairs.append((f"{prompt}<|im_start|>assistant\n{thought_given}", f"{reply}<|im_end|>\n"))
            prompt, results = "", []
        return pairs

    def _system(self, conversation: Conversation) -> str:
        system = conversation.system or self._default_system or ""
        if conversation.tools:
            system += TOOLS_BEFORE + "".join(f"\n{_json(tool)}" for tool in conversation.tools) + TOOLS_AFTER
        return f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""

    def _reply(self, turn: Message) -> tuple[str, str]:
        """The empty thought if the prompt gives it, and the reply's text without its terminator."""
        text = turn.content
        if self._enable_thinking is False:
            text = without_thoughts(text)
            if not text.strip() and not turn.tool_calls:
                raise NotUsable(
                    "a reply without anything but a thought, which enable_thinking: false removes"
                )
        elif turn.reasoning is not None:
            text = "<think>\n" + turn.reasoning.strip("\n") + "\n</think>\n\n" + text.lstrip("\n")
        has_thought = "<think>" in text or "</think>" in text
        if turn.tool_calls:
            spoken = text.rpartition("</think>")[2].strip("\n")
            text += ("\n" if spoken else "") + "\n".join(map(_tool_call, turn.tool_calls))
        if self._enable_thinking is False:
            return EMPTY_THOUGHT, text
        if has_thought:
            return "", text
        return ("", EMPTY_THOUGHT + text) if self._enable_thinking else (EMPTY_THOUGHT, text)


def _tool_call(call: ToolCall) -> str:
    """The call as the template writes it; names its keys in this order whatever the row's order was."""
    return f"<tool_call>\n{_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def _tool_responses(results: Sequence[str]) -> str:
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
