"""Conversations -> the tokenizer's chat template -> text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.meter import Stopped
from shardyard.data.templates.sandbox import ChatTemplateText
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

_TOOL = {"name": "probe_tool", "description": "Probe.", "parameters": {"type": "object", "properties": {}}}
_ASKED = Conversation((Message("user", "Question?"), Message("assistant", "Answer.")))
_CALLED = Conversation(
    (
        Message("user", "Question?"),
        Message("assistant", "", tool_calls=(ToolCall("probe_name", {"probe_key": "probe_value"}),)),
        Message("tool", "probe_result"),
        Message("assistant", "Answer."),
    )
)


_CHECKED = """
{%- set ns = namespace(seen=0) %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
{{ m | tojson }}{{ eos_token }}
    {% endgeneration %}
    {% set ns.seen = ns.seen + 1 %}
{% endfor %}
{{ ns.seen ~ (tools | tojson(indent=2)) ~ dict(a=enable_thinking) ~ [documents, 1.0] }}
"""
"""Uses what transformers gives chat templates; written here, so that it may run in transformers."""


class Renderer:
    """Renders turns by the tokenizer's own chat template, or by ``chat_template``, in our sandbox.

    How the template wants calls and tools is found out with a probe, once: arguments as a value or as JSON
    text, with or without ids, tools bare (as rows have them) or under ``function``.

    The text is what ``apply_chat_template`` gives, and that is checked once with a template of ours: the
    model's own is not trusted, so it never runs outside the sandbox.

    Raises:
        UserError: there is no chat template, it cannot be used, or transformers renders or tokenises in
            another way than we do.
    """

    def __init__(
        self, tokenizer: Any, enable_thinking: bool | None, *, chat_template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        if not (chat_template or tokenizer.chat_template):
            raise UserError(
                f"data.template: null, and the tokenizer {tokenizer.name_or_path!r} has no chat template; "
                f"set data.template: qwen3, or model.tokenizer_name_or_path to the chat model's tokenizer"
            )
        self._options = dict(tokenizer.special_tokens_map)
        if enable_thinking is not None:
            self._options["enable_thinking"] = enable_thinking
        self._arguments_as_text = self._with_ids = self._wrap_tools = False
        self._check_release()
        try:
            self._plain, self._for_tools = self._compiled(chat_template)
            self.render(_ASKED, 2)
            self._writes_calls = self._find_call_style()
            self._writes_tools = self._find_tool_style()
        except NotUsable as error:
            raise UserError(f"data.template: the chat template cannot be used: {error}") from error

    def _compiled(self, chat_template: str | None) -> tuple[ChatTemplateText, ChatTemplateText]:
        """The templates for conversations without and with tools; a tokenizer may have two."""
        if chat_template is not None:
            compiled = ChatTemplateText(chat_template)
            return compiled, compiled
        try:
            texts = [self._tokenizer.get_chat_template(None, tools) for tools in (None, [_TOOL])]
        except ValueError as error:  # several templates and none of them the default
            raise NotUsable((str(error).splitlines() or [""])[0]) from error
        plain = ChatTemplateText(texts[0])
        return plain, plain if texts[1] == texts[0] else ChatTemplateText(texts[1])

    def render(self, conversation: Conversation, num_turns: int, *, generation_prompt: bool = False) -> str:
        """The text of the system message, the tools and the first turns.

        Raises NotUsable, with the template's words, if it refuses them, and Stopped if it takes too much.
        """
        template = self._for_tools if conversation.tools else self._plain
        return template.render(
            messages=self._messages(conversation, num_turns),
            tools=self._tools(conversation.tools),
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._options,
        )

    def require(self, conversation: Conversation) -> None:
        """Raise NotUsable if the template would leave out the conversation's tools or calls in silence."""
        if conversation.tools and not self._writes_tools:
            raise NotUsable("the chat template does not show tools to the model")
        if not self._writes_calls and any(turn.tool_calls for turn in conversation.turns):
            raise NotUsable("the chat template does not write function calls")

    def _messages(self, conversation: Conversation, num_turns: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        calls: list[dict[str, Any]] = []
        result = 0
        for number, turn in enumerate(conversation.turns[:num_turns]):
            message: dict[str, Any] = {"role": turn.role, "content": turn.content}
            if turn.reasoning is not None:  # under both names, as transformers does
                message = {"thinking": turn.reasoning, **message, "reasoning_content": turn.reasoning}
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
            except Stopped:
                raise
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
        asked = Conversation(_ASKED.turns, tools=(_TOOL,))
        for self._wrap_tools in (False, True):
            try:
                if "probe_tool" in self.render(asked, 2):
                    return True
            except Stopped:
                raise
            except NotUsable:
                continue
        self._wrap_tools = False
        return False

    def _check_release(self) -> None:
        """Hold transformers to what we rest on: its text and ids of a chat are those of our rendering."""
        asked = Conversation((*_CALLED.turns[:3], Message("assistant", "<b>城</b>", "why")), "s")
        messages, tools = self._messages(asked, 4), [_TOOL]
        options = {**self._options, "enable_thinking": True}
        text = ChatTemplateText(_CHECKED).render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=False, **options
        )
        own = [
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=_CHECKED,
                tokenize=tokenize,
                return_dict=False,
                enable_thinking=True,
            )
            for tokenize in (False, True)
        ]
        if own != [text, list(self._tokenizer(text, add_special_tokens=False)["input_ids"])]:
            raise UserError(
                "data.template: this release of transformers renders or tokenises chat templates in another "
                "way than it is relied on here; install the versions of constraints.txt"
            )
