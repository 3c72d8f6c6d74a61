"""Conversations -> the tokenizer's chat template -> text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

_TOOL = {"name": "probe_tool", "description": "Probe.", "parameters": {"type": "object", "properties": {}}}
_CALLED = Conversation(
    (
        Message("user", "Question?"),
        Message("assistant", "", tool_calls=(ToolCall("probe_name", {"probe_key": "probe_value"}),)),
        Message("tool", "probe_result"),
        Message("assistant", "Answer."),
    )
)


class Renderer:
    """Renders turns by the tokenizer's own chat template, in transformers' sandbox.

    How the template wants calls and tools is found out with a probe, once: arguments as a value or as JSON
    text, with or without ids, tools bare (as rows have them) or under ``function``.

    Raises:
        UserError: there is no chat template, or transformers tokenises its text in another way than we do.
    """

    def __init__(self, tokenizer: Any, enable_thinking: bool | None) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise UserError(
                f"data.template: null, and the tokenizer {tokenizer.name_or_path!r} has no chat template; "
                f"set data.template: qwen3, or model.tokenizer_name_or_path to the chat model's tokenizer"
            )
        self._options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._arguments_as_text = self._with_ids = self._wrap_tools = False
        self._writes_calls = self._find_call_style()
        self._writes_tools = self._find_tool_style()
        self._check_ids()

    def render(self, conversation: Conversation, num_turns: int, *, generation_prompt: bool = False) -> str:
        """The text of the system message, the tools and the first turns.

        Raises NotUsable, with the template's words, if it refuses them.
        """
        return self._apply(conversation, num_turns, generation_prompt, tokenize=False)

    def require(self, conversation: Conversation) -> None:
        """Raise NotUsable if the template would leave out the conversation's tools or calls in silence."""
        if conversation.tools and not self._writes_tools:
            raise NotUsable("the chat template does not show tools to the model")
        if not self._writes_calls and any(turn.tool_calls for turn in conversation.turns):
            raise NotUsable("the chat template does not write function calls")

    def _apply(
        self, conversation: Conversation, num_turns: int, generation_prompt: bool, *, tokenize: bool
    ) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                self._messages(conversation, num_turns),
                tools=self._tools(conversation.tools),
                tokenize=tokenize,
                add_generation_prompt=generation_prompt,
                return_dict=False,
                **self._options,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise NotUsable(f"the chat template refuses it: {reason}") from error

    def _messages(self, conversation: Conversation, num_turns: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        calls: list[dict[str, Any]] = []
        result = 0
        for number, turn in enumerate(conversation.turns[:num_turns]):
            message: dict[str, Any] = {"role": turn.role, "content": turn.content}
            if turn.reasoning is not None:
                message["reasoning_content"] = turn.reasoning
            if turn.tool_calls:
                calls, result = (
                    [self._call(call, f"call{number:02d}{i:03d}") for i, call in enumerate(turn.tool_calls)],
                    0,
                )
                message["tool_calls"] = calls
            if turn.role == "tool" and self._with_ids and result < len(calls):
                message |= {"tool_call_id": calls[result]["id"], "name": calls[result]["function"]["name"]}
                result += 1
            messages.append(message)
        return messages

    def _call(self, call: ToolCall, call_id: str) -> dict[str, Any]:
        arguments = (
            json.dumps(call.arguments, ensure_ascii=False) if self._arguments_as_text else call.arguments
        )
        described = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        return {"id": call_id, **described} if self._with_ids else described

    def _tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        if not tools:
            return None
        if not self._wrap_tools:
            return list(tools)
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]

    def _find_call_style(self) -> bool:
        """Settle how calls are given; False if no way is written out with its JSON intact."""
        for self._with_ids, self._arguments_as_text in product((False, True), (False, True)):
            try:
                text = self.render(_CALLED, 4)
            except NotUsable:
                continue
            wanted = ("probe_name", "probe_key", "probe_value", "probe_result")
            # a mapping printed by Python, or JSON text encoded a second time, would be trained as it is
            spoilt = ("{'probe_key'", '{\\"probe_key')
            if all(word in text for word in wanted) and not any(word in text for word in spoilt):
                return True
        self._with_ids = self._arguments_as_text = False
        return False

    def _find_tool_style(self) -> bool:
        """Settle how tools are given; False if they are not written."""
        asked = Conversation((Message("user", "Question?"), Message("assistant", "Answer.")), tools=(_TOOL,))
        for self._wrap_tools in (False, True):
            try:
                if "probe_tool" in self.render(asked, 2):
                    return True
            except NotUsable:
                continue
        self._wrap_tools = False
        return False

    def _check_ids(self) -> None:
        """Hold transformers to what the masks rest on: the ids of a rendering are those of its text."""
        asked = Conversation((Message("user", "Question?"), Message("assistant", "Answer.")))
        try:
            text = self.render(asked, 2)
            ids = self._apply(asked, 2, False, tokenize=True)
        except NotUsable as error:
            raise UserError(
                f"data.template: the tokenizer's chat template cannot be used: {error}"
            ) from error
        expected = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(ids, list) or ids != list(expected):
            raise UserError(
                "data.template: this release of transformers tokenises the chat template in another way than "
                "its text; install the versions of constraints.txt"
            )
