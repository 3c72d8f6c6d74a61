"""Chat templates in the sandbox: transformers' text for what they do, one line for what they must not."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer

from shardyard.data.dropped import Dropped, NotUsable
from shardyard.data.encode import Encoder
from shardyard.data.templates import meter
from shardyard.data.templates.meter import Stopped
from shardyard.data.templates.render import Renderer
from shardyard.data.templates.sandbox import ChatTemplateText
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

MESSAGES = [
    {"role": "system", "content": "be <b>brief</b> & 'kind'"},
    {"role": "user", "content": "  q1 城\nline two\n"},
    {"role": "assistant", "content": "r1", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, 2.5]}}]},
    {"role": "tool", "content": "a,b,,c"},
    {"role": "assistant", "content": "<think>t</think>r2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "城 <x>", "parameters": {}}}]

LOOPS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}"
    "{{ loop.revindex0 }}{% endfor %}",
    "{% for m in messages if m.role != 'tool' %}{{ loop.index0 ~ m.role }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}"
    "{{ loop.nextitem.role if not loop.last }}|{% endfor %}",
    "{% for m in messages %}{% if loop.changed(m.role) %}{{ loop.cycle('a', 'b') }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}{% for m in nothing %}x{% endfor %}",
    "{% for k, v in {'a': 1, 'b': {'c': 2}}.items() recursive %}{{ k }}"
    "{% if v is mapping %}<{{ loop(v.items()) }}>{% else %}{{ v }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "{% for m in messages[1:][::-1] %}{{ m.role[:2] }}{% endfor %}{{ messages[-1].content[3:] }}",
    "{% for a, b in [('x', 1), ('y', 2)] %}{{ a }}{{ b }}{% endfor %}"
    "{% for i in range(3) %}{{ i }}{% endfor %}",
]
EXPRESSIONS = [
    "{{ 1 + 2 * 3 ** 2 // 4 % 5 - 1 }} {{ 7 / 2 }} {{ 'ab' * 2 }} {{ [1] * 2 }} {{ 'a' + 'b' }}"
    " {{ 2.5 * 2 }}",
    "{{ 1 ~ 'a' ~ none ~ true ~ [1, 'b'] ~ 1.0 ~ nothing }}",
    "{{ 'in 2024 (c) 10000 **%s.** %5.3f' % ('x', 2.5) }} {{ '%(a)s %(b)04d %%1000' % {'a': 1, 'b': 2} }}",
    "{{ 'x%sy%03d' % ('城', 7) }} {{ '{} {a:>5}'.format(1, a='q') }} {{ '%d%%' | format(5) }}",
    "{{ 'a' in 'abc' }} {{ 'role' in messages[0] }} {{ 1 < 2 <= 2 }} {{ [1, 2] == [1, 2] }}"
    " {{ 2 not in [1] }}",
    "{{ 'yes' if tools else 'no' }} {{ 'x' if documents }} {{ nothing | default('d') }} {{ not tools }}",
    "{{ messages[0]['content'] }} {{ messages[2].tool_calls[0].arguments.x }} {{ messages[0].missing }}",
    "{{ {'a': 1, 'b': [messages[0].role]} }} {{ (1, messages[0].role) }} {{ dict(a=1, **{'b': 2}) }}",
    "{{ messages[0] is mapping }} {{ 'a' is string }} {{ none is none }} {{ 3 is odd }} {{ 2 is in [1, 2] }}"
    " {{ 'upper' is filter }} {{ messages is iterable }} {{ 4 is divisibleby 2 }} {{ 1 is eq 1 }}",
    "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ enable_thinking }}",
]
METHODS = [
    "{{ messages[1].content.strip() }}|{{ messages[1].content.split('\n') }}|{{ 'a b  c'.split() }}",
    "{{ 'aXbXc'.replace('X', '--') }} {{ 'aaa'.replace('a', 'b', 1) }} {{ 'ab'.replace('', '.') }}",
    "{{ ', '.join(['a', 'b']) }} {{ 'abc'.startswith('ab') }} {{ 'a-b-c'.rsplit('-', 1) }} {{ 'x'.upper() }}",
    "{{ 'k: v'.partition(': ') }} {{ 'abc'.find('c') }} {{ 'tEst'.capitalize() }} {{ 'a\nb'.splitlines() }}",
    "{{ messages[0].get('role') }} {{ messages[0].get('x', 'y') }} {{ messages[0].keys() | list }}",
    "{{ 'abc'.removeprefix('a').removesuffix('c') }} {{ '  x '.lstrip() }} {{ 'x  '.rstrip() }}"
    " {{ '1'.isdigit() }}",
]
FILTERS = [
    "{{ tools | tojson }} {{ tools | tojson(indent=4) }} {{ '城' | tojson(ensure_ascii=True) }}"
    " {{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}",
    "{{ messages[1].content | trim }} {{ 'abc' | upper | lower | title | capitalize }}"
    " {{ 5 | string ~ 'x' }}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ [1, 2] | join('-') }} {{ messages | length }}",
    "{{ messages | selectattr('role', 'equalto', 'tool') | list | count }}"
    " {{ messages | rejectattr('tool_calls') | map(attribute='content') | first }}",
    "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1} | items | list }} {{ [3, 1, 2] | sort }}"
    " {{ [1, 1] | unique | list }}",
    "{{ ['a', '', 'b'] | select | list }} {{ [1, 2, 3] | reject('odd') | list }}"
    " {{ 'abc' | reverse }} {{ [1, 2] | last }}",
    "{{ 'x\ny' | indent(2) }} {{ 'x\ny' | indent('> ', true) }}"
    " {{ 'a-b' | replace('-', '+') }} {{ 'a b' | wordcount }}",
    "{{ '<a>' | e }} {{ '<a>' | escape }} {{ '<a>' | safe }} {{ tools | tojson | safe }} {{ 'x' | d('y') }}",
    "{{ 2.567 | round(1) }} {{ -3 | abs }} {{ '7' | int }} {{ 'x' | int(3) }}"
    " {{ '2.5' | float }} {{ [1, 2] | sum }}"
    " {{ [1, 3] | max }} {{ [1, 3] | min }}",
    "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}"
    "{{ messages[0] | attr('role') }} {{ messages | sum(attribute='n', start=1) if false else 'no' }}",
]
BLOCKS = [
    "{% macro show(m, mark='#') %}{{ mark }}{{ m.role }}{{ caller() if caller }}{% endmacro %}"
    "{{ show(messages[0]) }}{{ show(messages[1], mark='*') }}{% call show(messages[2]) %}!{% endcall %}",
    "{% macro all() %}{{ varargs | join('+') }}{{ kwargs | dictsort }}{% endmacro %}{{ all(1, 2, a=3) }}",
    "{% set text %}a{% for i in range(2) %}{{ i }}{% endfor %}b{% endset %}{{ text ~ text | length }}",
    "{% filter upper %}shout {{ messages[0].role }}{% endfilter %}{% raw %}{{ raw }}{% endraw %}{# no #}",
    "{% for m in messages %}{% generation %}{{ m.role }}\n{% endgeneration %}{% endfor %}",
    "  {% if true %}\n  lead\n  {%- endif %}\n\n  {% set a = 1 %}\nb {{- a -}}  c\n",
    "{% with x = messages[0].role %}{{ x }}{% endwith %}"
    "{% if messages[0].role == 'user' %}u{% elif tools %}t{% endif %}",
    "{% block body %}{{ messages[0].role }}{% endblock %}{{ self.body() }}",
]


def transformers_text(text: str, **options: Any) -> str:
    return byte_tokenizer(text).apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, **options)


def our_text(text: str, **options: Any) -> str:
    variables = {"messages": MESSAGES, "tools": TOOLS, "documents": None, "add_generation_prompt": False}
    names = byte_tokenizer(text).special_tokens_map
    return ChatTemplateText(text).render(**{**variables, **names, **options})


@pytest.mark.parametrize("text", LOOPS + EXPRESSIONS + METHODS + FILTERS + BLOCKS)
def test_every_piece_of_the_language_renders_as_in_transformers(text: str) -> None:
    assert our_text(text, enable_thinking=False) == transformers_text(text, enable_thinking=False)


WORDS = st.text(st.sampled_from("ab \n<>{}%'\"&城\u2028😀"), max_size=8)
CALLS = st.builds(
    lambda name, x: (ToolCall(name or "f", {"x": x}),), WORDS, WORDS | st.integers() | st.none()
)


@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([tiny.QWEN3_LIKE, tiny.CHATML, tiny.ENDS_THE_LAST, tiny.OPENS_A_THOUGHT]),
    said=st.lists(st.tuples(WORDS, WORDS, st.none() | WORDS, st.just(()) | CALLS), min_size=1, max_size=3),
    system=st.none() | WORDS,
    thinking=st.sampled_from([None, True, False]),
)
def test_a_conversation_renders_as_in_transformers(
    template: str, said: list[Any], system: str | None, thinking: bool | None
) -> None:
    tokenizer = byte_tokenizer(template)
    turns: list[Message] = []
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered, thought, calls in said:
        turns += [Message("user", asked), Message("assistant", answered, thought, calls)]
        reply: dict[str, Any] = {"role": "assistant", "content": answered, "reasoning_content": thought}
        if calls:
            described = [{"name": call.name, "arguments": call.arguments} for call in calls]
            reply["tool_calls"] = [{"type": "function", "function": call} for call in described]
        messages += [{"role": "user", "content": asked}, reply]
    options = {} if thinking is None else {"enable_thinking": thinking}
    for prompt in (False, True):
        ours = Renderer(tokenizer, thinking).render(
            Conversation(tuple(turns), system), len(turns), generation_prompt=prompt
        )
        theirs = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **options
        )
        assert ours == theirs


# What a template must not do

GROWS = "{% set ns = namespace(x=@) %}{% for i in range(99) %}{% set ns.x = # %}{% endfor %}"


def grows(start: str, step: str) -> str:
    """A template that makes a value from itself 99 times."""
    return GROWS.replace("@", start).replace("#", step)


STOPPED = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**9 * (0,) }}",
    "{{ 10 ** (10 ** 9) }}",
    grows("3", "ns.x * ns.x"),
    grows("'ab'", "ns.x + ns.x"),
    grows("'ab'", "ns.x ~ ns.x"),
    grows("'ab'", "'%s%s' % (ns.x, ns.x)"),
    grows("'ab'", "'{0}{0}'.format(ns.x)"),
    grows("'ab'", "ns.x.join(ns.x)"),
    grows("'ab'", "[ns.x, ns.x] | join"),
    grows("'ab'", "ns.x.replace('', 'abcd')"),
    grows("'ab'", "ns.x | replace('a', 'aaa')"),
    grows("['ab']", "ns.x + ns.x"),
    grows("['ab']", "[ns.x, ns.x]"),
    grows("('ab',)", "(ns.x, ns.x)"),
    grows("{}", "{'a': ns.x, 'b': ns.x}"),
    grows("{}", "dict(a=ns.x, b=ns.x)"),
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' | format(1.0) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a\nb' | indent(999999999) }}",
    "{{ {'a': 1} | tojson(indent=999999999) }}",
    "{{ [[1], [2]] | sum(start=[]) }}",
    "{% for k in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "{% set b = 'a' * 3000000 %}{% for k in range(99999) %}{% set c = b[1:] %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% set b = 'a' * 4000000 %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x + [b.partition('b')[0]] %}{% endfor %}",
    "{% set a = 'a' * 1900000 %}{{ (a ~ a).rfind('b' ~ a) }}",
    "{% set a = 'a' * 1900000 %}{{ (a ~ a).rsplit(sep='b' ~ a) }}",
    "{% set a = 'b' * 1900000 ~ 'a' %}{{ ('a' * 4000000).strip(a) }}",
    "{% set a = 'b' * 1900000 ~ 'a' %}{{ ('a' * 4000000) | trim(a) }}",
    "{{ ('%(' * 1900000) % {'a': 1} }}",
    "{{ ('%(a)*' * 190000) % {'a': 1} }}",
    "{% set b = ['a' * 1000000] * 1000 %}{{ b }}",
    "{{ range(99999) | map(attribute='no', default='a' * 1000000) | join }}",
]


@pytest.mark.parametrize("text", STOPPED)
def test_a_template_that_takes_too_much_is_stopped_within_seconds(text: str) -> None:
    template = ChatTemplateText(text)
    begin = time.thread_time()
    with pytest.raises(Stopped, match=r"^the chat template was stopped: [^\n]+$"):
        template.render(messages=MESSAGES)
    assert time.thread_time() - begin < 8


def test_stopping_them_takes_little_memory() -> None:
    """In a process of its own, as the peak of a process only grows; its limit would end a blow-up."""
    code = (
        "import json, resource, sys\n"
        "from shardyard.data.templates.sandbox import ChatTemplateText\n"
        "from shardyard.data.templates.meter import Stopped\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))\n"
        "ChatTemplateText('warm').render()\n"
        "before = peak()\n"
        "for text in json.load(sys.stdin):\n"
        "    try: ChatTemplateText(text).render(messages=[])\n"
        "    except Stopped: pass\n"
        "print(peak() - before)\n"
    )
    given = json.dumps([text for text in STOPPED if "99999) " not in text])
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200  # MiB; 'a' * 10**9 alone would take 954


def test_what_is_slow_at_a_small_cost_is_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "SECONDS", 0.2)
    text = "{% set b = 'a' * 4000000 %}{% for k in range(99999) %}{{ 'x' if 'b' in b }}{% endfor %}"
    begin = time.thread_time()
    with pytest.raises(Stopped, match=r"ran longer than 0\.2 s$"):
        ChatTemplateText(text).render()
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].mro }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a\tb'.expandtabs(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ lipsum(n=100) }}",
        "{{ range(10**9) }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{% extends 'other' %}",
    ],
)
def test_what_the_sandbox_withholds_is_refused_in_one_line(text: str) -> None:
    messages = [{"role": "user", "content": "q"}]
    with pytest.raises(NotUsable, match=r"^the chat template refuses it: [^\n]+$"):
        ChatTemplateText(text).render(messages=messages)
    assert messages == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{% if %}", r"^line 1: Expected an expression"),
        ("a\n{% for x in y %}", r"^line 2: Unexpected end of template"),
        ("{{ 'a' | center(10) }}", r"^line 1: No filter named 'center'"),
        ("{% autoescape true %}{% endautoescape %}", r"^line 1: autoescape is not for chat templates$"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", r"^it cannot be compiled: [^\n]+$"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, r"^it cannot be compiled: [^\n]+$"),
        ("{% for x in [1] %}" * 40 + "{% endfor %}" * 40, r"^it cannot be compiled: too many"),
        ("{{ " + "9" * 5000 + " }}", r"^it cannot be compiled: [^\n]+$"),
        ("x" * 200_000, r"^it has 200000 characters; at most 131072 are read$"),
    ],
)
def test_a_text_that_is_no_template_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(NotUsable, match=why):
        ChatTemplateText(text)


def test_the_limits_grow_with_what_is_rendered() -> None:
    copies = "{% for i in range(8) %}{{ messages[0].content }}{% endfor %}"
    content = "x" * (2 << 20)
    assert len(ChatTemplateText(copies).render(messages=[{"content": content}])) == 8 * len(content)
    with pytest.raises(Stopped):
        ChatTemplateText("{% for i in range(99) %}{{ messages[0].content }}{% endfor %}").render(
            messages=[{"content": content}]
        )


def test_a_rendering_that_was_stopped_leaves_nothing_to_the_next() -> None:
    template = ChatTemplateText("{{ 'a' * n }}")
    for _ in range(3):
        with pytest.raises(Stopped):
            template.render(n=10**9)
        assert template.render(n=3) == "aaa"


def test_a_template_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(ChatTemplateText("{{ a }}"))).render(a=1) == "1"


# In the data room


def test_a_hostile_template_is_a_users_error_of_one_line_at_the_start() -> None:
    for text in (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content * 10**9 }}",
        "{% if tools %}{{ 'a' * 10**9 }}{% endif %}" + tiny.CHATML,
        "{% if",
    ):
        with pytest.raises(UserError, match=r"^data\.template: the chat template cannot be used: [^\n]+$"):
            Encoder(byte_tokenizer(text))


def test_a_template_that_behaves_until_a_row_sets_it_off_drops_that_row() -> None:
    text = tiny.CHATML + "{% if 'go' in messages[0].content %}{{ 'a' * 10**9 }}{% endif %}"
    encoder = Encoder(byte_tokenizer(text))

    def asked(question: str) -> Any:
        turns = (Message("user", question), Message("assistant", "r"))
        return encoder.encode(Conversation(turns, where="f:3"))

    why = "the chat template was stopped: it makes a value that is too large"
    assert asked("go") == Dropped(why, "f:3")
    assert not isinstance(asked("q"), Dropped)


def test_the_models_own_template_runs_in_the_sandbox_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(tiny.CHATML)
    seen: list[str] = []
    own = tokenizer.apply_chat_template

    def watched(*args: Any, chat_template: str | None = None, **kwargs: Any) -> Any:
        seen.append(chat_template or "the model's own")
        return own(*args, chat_template=chat_template, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", watched)
    Encoder(tokenizer).encode(Conversation((Message("user", "q"), Message("assistant", "r"))))
    assert seen and "the model's own" not in seen and tiny.CHATML not in seen


def test_a_release_that_renders_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(tiny.CHATML)
    own = tokenizer.apply_chat_template
    for spoilt in (lambda found: found + type(found)(found[-1:]), lambda found: {"input_ids": found}):
        monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, f=spoilt, **k: f(own(*a, **k)))
        with pytest.raises(UserError, match=r"this release of transformers .* constraints\.txt"):
            Renderer(tokenizer, None)


def test_a_users_template_takes_the_place_of_the_tokenizers() -> None:
    conversation = Conversation((Message("user", "q"), Message("assistant", "r")))
    for own in (tiny.CHATML, None):
        renderer = Renderer(byte_tokenizer(own), None, chat_template=tiny.ENDS_THE_LAST)
        assert renderer.render(conversation, 2) == "<|user|>q<|end|><|assistant|>r<|end|><|eot|>"


def test_a_tokenizer_with_a_template_for_tools_uses_it_for_tools() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": tiny.CHATML, "tool_use": tiny.QWEN3_LIKE}
    renderer = Renderer(tokenizer, None)
    turns = (Message("user", "q"), Message("assistant", "r"))
    tool = {"type": "function", "function": {"name": "f"}}
    said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
    for tools in ((), (tool,)):
        theirs = tokenizer.apply_chat_template(list(said), tools=list(tools) or None, tokenize=False)
        assert renderer.render(Conversation(turns, None, tools), 2) == theirs
    tokenizer.chat_template = {"other": tiny.CHATML}
    with pytest.raises(UserError, match=r"^data\.template: the chat template cannot be used"):
        Renderer(tokenizer, None)
