"""A named template as the chat template (jinja) of an exported tokenizer: the text that was trained.

Every turn of a rendering is what training saw: thoughts of earlier replies are kept unless training removed
them. Whoever renders may pass ``enable_thinking``, which decides about the reply to come: false ends the
generation prompt with the empty thought. Without it the run's own setting holds.
"""

from __future__ import annotations

import json

from shardyard.data.templates import qwen3

_QWEN3 = r"""
{%- set keep_thoughts = @THINKING@ %}
{%- set thinking = enable_thinking if enable_thinking is defined else keep_thoughts %}
{%- set system = (messages[0].content if messages[0].role == 'system' else '') or @SYSTEM@ %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system }}
    {%- if tools %}
        {{- @TOOLS_BEFORE@ }}
        {%- for tool in tools %}
            {{- '\n' + (tool | tojson) }}
        {%- endfor %}
        {{- @TOOLS_AFTER@ }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set text = namespace(value=content) %}
        {%- if not keep_thoughts %}
            {%- set text.value = '' %}
            {%- for piece in content.split('</think>') %}
                {%- if loop.last %}
                    {%- set text.value = text.value + piece %}
                {%- elif '<think>' in piece %}
                    {%- set text.value = text.value + piece.split('<think>')[0] %}
                {%- else %}
                    {%- set text.value = text.value + piece + '</think>' %}
                {%- endif %}
            {%- endfor %}
            {%- set text.value = text.value.lstrip('\n') %}
        {%- elif message.reasoning_content is string %}
            {%- set thought = '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' %}
            {%- set text.value = thought + content.lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if not keep_thoughts or ('<think>' not in text.value and '</think>' not in text.value) %}
            {{- @EMPTY_THOUGHT@ }}
        {%- endif %}
        {{- text.value }}
        {%- set spoken = text.value.split('</think>')[-1].strip('\n') %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {%- if spoken or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('' if thinking else @EMPTY_THOUGHT@) }}
{%- endif %}
"""


def chat_template_of(
    name: str | None, *, enable_thinking: bool | None = True, default_system: str | None = None
) -> str | None:
    """The jinja text of ``data.template``; None where the tokenizer's own chat template was used.

    ``enable_thinking`` and ``default_system`` are those of the training; a thought that training neither
    asked for nor removed (null) is left to the model.
    """
    if name != qwen3.Qwen3Template.name:
        return None
    text = _QWEN3.strip()
    for place, value in (
        ("@THINKING@", "false" if enable_thinking is False else "true"),
        ("@TOOLS_BEFORE@", _literal(qwen3.TOOLS_BEFORE)),
        ("@TOOLS_AFTER@", _literal(qwen3.TOOLS_AFTER)),
        ("@EMPTY_THOUGHT@", _literal(qwen3.EMPTY_THOUGHT)),
        ("@SYSTEM@", _literal(default_system or "")),  # last, as it may hold the other words
    ):
        text = text.replace(place, value)
    return text


def _literal(text: str) -> str:
    """A string of jinja, whose escapes are Python's: JSON's without the surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)
