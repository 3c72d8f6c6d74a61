"""Templates that no wheel carries, against texts worked out from their documentation, and what is trained."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from support.tokenizers import byte_tokenizer

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.templates import build_template
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

TOOL = {
    "name": "f",
    "description": "Weather.",
    "parameters": {
        "type": "object",
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "Where", "enum": ["A", "B"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
    },
}
CALLS = (ToolCall("f", {"city": "A", "n": None}), ToolCall("f", {}))
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>",
)  # fmt: skip


def talk(*replies: Message | str, system: str | None = None, **fields: Any) -> Conversation:
    turns: list[Message] = []
    for number, reply in enumerate(replies, start=1):
        turns.append(Message("user", f"Q{number}"))
        turns.append(reply if isinstance(reply, Message) else Message("assistant", reply))
    return Conversation(tuple(turns), system, **fields)


def calling(tools: bool = True, said: str = "") -> Conversation:
    turns = (
        Message("user", "Q"),
        Message("assistant", said, tool_calls=CALLS),
        Message("tool", '{"x": 1}'),
        Message("tool", "2"),
        Message("assistant", "R"),
    )
    return Conversation(turns, "S", (TOOL,) if tools else ())


def marked(template: str, conversation: Conversation, **options: Any) -> str:
    """The decoded sample with what is trained in ``[[ ]]``."""
    tokenizer = byte_tokenizer(special=SPECIAL, eos="</s>" if template != "gpt" else "<|return|>")
    tokenizer.bos_token = "<s>"
    samples = Encoder(tokenizer, template=template, cutoff_len=10**6, **options).encode(conversation)
    assert not isinstance(samples, Dropped), samples
    (sample,) = samples
    targets = [-100, *sample.labels.tolist()]
    stretches = groupby(
        zip(sample.input_ids.tolist(), targets, strict=False), key=lambda pair: pair[1] != -100
    )
    text = ""
    for trained, pairs in stretches:
        decoded = tokenizer.decode([token for token, _ in pairs])
        text += f"[[{decoded}]]" if trained else decoded
    return text


CHATML_Q = "<|im_start|>user\nQ{n}<|im_end|>\n<|im_start|>assistant\n"


def test_chatml() -> None:
    q1, q2 = CHATML_Q.replace("{n}", "1"), CHATML_Q.replace("{n}", "2")
    assert marked("chatml", talk("R1")) == f"{q1}[[R1<|im_end|>\n]]"
    assert marked("chatml", talk("R1", "R2", system="S")) == (
        f"<|im_start|>system\nS<|im_end|>\n{q1}[[R1<|im_end|>\n]]{q2}[[R2<|im_end|>\n]]"
    )
    thought = Message("assistant", "R1", "T")
    assert marked("chatml", talk(thought)) == f"{q1}[[<think>\nT\n</think>\n\nR1<|im_end|>\n]]"
    assert marked("chatml", talk(thought), enable_thinking=False) == f"{q1}[[R1<|im_end|>\n]]"


DEFAULT_TOOLS = (
    "You have access to the following tools:\n"
    "> Tool Name: f\nTool Description: Weather.\nTool Args:\n"
    "  - city (string, required): Where, should be one of [A, B]\n"
    "  - days (array): , where each item should be integer\n\n"
    "Use the following format if using a tool:\n```\nAction: tool name (one of [f])\n"
    "Action Input: the input to the tool, in a JSON format representing the kwargs "
    '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
)
DEFAULT_CALLS = 'Action: f\nAction Input: {"city": "A", "n": null}\nAction: f\nAction Input: {}'


@pytest.mark.parametrize("said", ["", "I look."])
def test_the_default_tool_format(said: str) -> None:
    calls = f"{said}\n{DEFAULT_CALLS}" if said else DEFAULT_CALLS
    assert marked("chatml", calling(said=said)) == (
        f"<|im_start|>system\nS{DEFAULT_TOOLS}<|im_end|>\n"
        f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[{calls}<|im_end|>\n]]"
        '<|im_start|>user\n{"x": 1}\n2<|im_end|>\n<|im_start|>assistant\n[[R<|im_end|>\n]]'
    )


def test_another_tool_format_by_name() -> None:
    text = marked("chatml", calling(tools=False), tool_format="qwen")
    calls = '<tool_call>\n{"name": "f", "arguments": {"city": "A", "n": null}}\n</tool_call>\n'
    assert f'[[{calls}<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call><|im_end|>\n]]' in text


def test_default() -> None:
    assert marked("default", talk("R1")) == "Human: Q1\nAssistant:[[R1</s>]]"
    assert marked("default", talk("R1", "R2", "R3", system="S")) == (
        "S\nHuman: Q1\nAssistant:[[R1</s>]]\nHuman: Q2\nAssistant:[[R2</s>]]\nHuman: Q3\nAssistant:[[R3</s>]]"
    )
    assert marked("default", calling()) == (
        f"S{DEFAULT_TOOLS}\nHuman: Q\nAssistant:[[{DEFAULT_CALLS}</s>]]"
        '\nHuman: {"x": 1}\n2\nAssistant:[[R</s>]]'
    )


def test_mistral() -> None:
    assert marked("mistral", talk("R1")) == "<s>[INST] Q1[/INST][[ R1</s>]]"
    assert marked("mistral", talk("R1", "R2", system="S")) == (
        "<s>[INST] S\n\nQ1[/INST][[ R1</s>]][INST] Q2[/INST][[ R2</s>]]"
    )
    described = (
        '{"type": "function", "function": {"name": "f", "description": "Weather.", "parameters": '
        '{"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "description": '
        '"Where", "enum": ["A", "B"]}, "days": {"type": "array", "items": {"type": "integer"}}}}}}'
    )
    calls = '{"name": "f", "arguments": {"city": "A", "n": null}}, {"name": "f", "arguments": {}}'
    assert marked("mistral", calling()) == (
        f"<s>[AVAILABLE_TOOLS] [{described}][/AVAILABLE_TOOLS]"
        f"[INST] S\n\nQ[/INST][[[TOOL_CALLS] [{calls}]</s>]]"
        '[TOOL_RESULTS] {"content": {"x": 1}}[/TOOL_RESULTS][TOOL_RESULTS] {"content": 2}[/TOOL_RESULTS]'
        "[[ R</s>]]"
    )


GPT_SYSTEM = "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.<|end|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


def gpt_q(number: int) -> str:
    return f"<|start|>user<|message|>Q{number}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("enable_thinking", "given", "own"),
    [(True, "", ANALYSIS + FINAL), (False, ANALYSIS + FINAL, ""), (None, ANALYSIS + FINAL, "")],
)
def test_gpt(enable_thinking: bool | None, given: str, own: str) -> None:
    options = {"enable_thinking": enable_thinking}
    assert marked("gpt", talk("R1"), **options) == (
        f"{GPT_SYSTEM}{gpt_q(1)}{given}[[{own}R1<|end|><|return|>]]"
    )
    # one eos, at the very end; the next question's first token is not trained
    assert marked("gpt", talk("R1", "R2", system="S"), **options) == (
        f"<|start|>system<|message|>S<|end|>{gpt_q(1)}{given}[[{own}R1<|end|>]]"
        f"{gpt_q(2)}{given}[[{own}R2<|end|><|return|>]]"
    )


def test_gpt_thoughts() -> None:
    thought = Message("assistant", "R1", "T")
    assert marked("gpt", talk(thought)) == f"{GPT_SYSTEM}{gpt_q(1)}[[{ANALYSIS}T{FINAL}R1<|end|><|return|>]]"
    in_words = f"{ANALYSIS}T{FINAL}R1"
    assert marked("gpt", talk(in_words)) == f"{GPT_SYSTEM}{gpt_q(1)}[[{in_words}<|end|><|return|>]]"
    assert marked("gpt", talk(in_words), enable_thinking=False) == (
        f"{GPT_SYSTEM}{gpt_q(1)}{ANALYSIS}{FINAL}[[R1<|end|><|return|>]]"
    )
    tags = "<think>T</think>R1"
    assert marked("gpt", talk(tags)) == f"{GPT_SYSTEM}{gpt_q(1)}[[{ANALYSIS}{FINAL}{tags}<|end|><|return|>]]"
    assert tags in marked("gpt", talk(tags), enable_thinking=False)


def test_gpt_keeps_the_eos_that_it_writes_and_refuses_to_train_prompts() -> None:
    tokenizer = byte_tokenizer(special=SPECIAL, eos="<|return|>")
    build_template("gpt", tokenizer)
    assert tokenizer.eos_token == "<|return|>"
    with pytest.raises(UserError, match=r"data\.train_on_prompt: the template gpt trains replies only"):
        build_template("gpt", tokenizer, train_on_prompt=True)
    with pytest.raises(UserError, match="gpt needs an eos token"):
        build_template("gpt", byte_tokenizer(special=SPECIAL, eos=None))


def test_empty() -> None:
    assert marked("empty", talk("R1")) == "Q1[[R1]]"
    assert marked("empty", talk("R1", "R2", "R3", system="S")) == "SQ1[[R1]]Q2[[R2]]Q3[[R3]]"
    assert marked("empty", calling(tools=False)) == f'SQ[[{DEFAULT_CALLS}]]{{"x": 1}}\n2[[R]]'


def test_prompt_and_reply_of_empty_and_gpt_are_tokenised_apart() -> None:
    tokenizer = byte_tokenizer(special=SPECIAL, eos="<|return|>")
    # "in" is one token, unless it is the prompt's last letter and the reply's first
    for name in ("empty", "gpt"):
        template = build_template(name, tokenizer, enable_thinking=None, default_system="")
        ((turn,),) = template.encode(Conversation((Message("user", "i"), Message("assistant", "n"))))
        assert turn.reply[0] == tokenizer("n")["input_ids"][0]
