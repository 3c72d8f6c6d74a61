"""Where the reply begins if one token holds the prompt's last characters and the reply's first."""

from __future__ import annotations

import logging
import string
from typing import Any

import pytest
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer

from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder
from shardyard.data.types import Conversation, Message

PIECES = ("▁Paris", "▁Rome", "▁A", "▁no", "▁", "▁▁", "\n", "[INST]", "[/INST]", "e:", "in")

ONE_TOKEN = "the prompt's last token and the reply's first are one token"

ASKED_WITH_A_SPACE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Its generation prompt ends with a space."""

NO_SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} x{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
"""The reply stands right behind the prompt's last letter."""


def piece_tokenizer(chat_template: str, *, marker: bool, scheme: str = "first") -> Any:
    """A unigram model over ``▁`` for spaces, as SentencePiece writes one; ``[/INST]`` is plain text, and a
    piece of its own only with ``marker``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_letters + string.punctuation
    pieces = [piece for piece in PIECES if marker or "INST" not in piece]
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((c, -9.0) for c in letters), *((p, -3.0) for p in pieces)]
    vocab += [("▁x", -3.0), ("xno", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = chat_template
    return fast


def talk(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], t) for i, t in enumerate(texts)), where="f:1")  # type: ignore[arg-type]


def trained_pieces(tokenizer: Any, sample: Any) -> list[list[str]]:
    """The stretches of targets as pieces."""
    stretches: list[list[str]] = [[]]
    for label in sample.labels.tolist():
        if label != -100:
            stretches[-1].append(tokenizer.convert_ids_to_tokens(label))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


@pytest.mark.parametrize("marker", [True, False])
@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_a_space_that_joins_the_replys_first_word_is_trained_with_it(
    marker: bool, split_special_tokens: bool
) -> None:
    tokenizer = piece_tokenizer(tiny.INSTRUCTION, marker=marker)
    conversation = talk("in?", "Paris", "in?", "Rome no")
    (sample,) = Encoder(tokenizer, split_special_tokens=split_special_tokens).encode(conversation)  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["▁Paris", "</s>"], ["▁Rome", "▁no", "</s>"]]
    text = "<s>[INST] in? [/INST] Paris</s>[INST] in? [/INST] Rome no</s>"
    assert sample.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_is_given_before_such_a_reply_is_the_prompt_as_generation_gives_it() -> None:
    tokenizer = piece_tokenizer(tiny.INSTRUCTION, marker=True)
    (sample,) = Encoder(tokenizer).encode(talk("in?", "Paris"))  # type: ignore[misc]
    first = next(t for t, label in enumerate(sample.labels.tolist()) if label != -100)
    question = [{"role": "user", "content": "in?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert sample.input_ids[: first + 1].tolist() == asked


def test_special_tokens_in_the_text_that_cannot_be_split_drop_the_row() -> None:
    conversation = talk("in?", "Paris </s> no")
    beginning_only = piece_tokenizer(tiny.INSTRUCTION, marker=True)
    outcome = Encoder(beginning_only, split_special_tokens=True).encode(conversation)
    assert isinstance(outcome, Dropped) and "cannot split inside a template" in outcome.reason
    everywhere = piece_tokenizer(tiny.INSTRUCTION, marker=True, scheme="always")
    outcome = Encoder(everywhere, split_special_tokens=True).encode(conversation)
    assert isinstance(outcome, Dropped) and "model does not split" in outcome.reason


def test_a_byte_level_token_with_the_prompts_space_is_trained_where_special_tokens_are_split() -> None:
    tokenizer = byte_tokenizer(tiny.INSTRUCTION)
    conversation = talk("q", "two</s>s")
    (sample,) = Encoder(tokenizer, split_special_tokens=True).encode(conversation)  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["Ġt", "w", "o", "<", "/", "s", ">", "s", "</s>"]]


def test_byte_level_tokens_that_begin_with_the_prompts_space_are_trained() -> None:
    tokenizer = byte_tokenizer(tiny.INSTRUCTION)  # " t" is one token, " r" is two
    (sample,) = Encoder(tokenizer).encode(talk("q", "two", "q", "run"))  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["Ġt", "w", "o", "</s>"], ["r", "u", "n", "</s>"]]


def test_a_token_with_letters_of_the_prompt_and_of_the_reply_drops_the_row() -> None:
    tokenizer = piece_tokenizer(NO_SPACE, marker=True)
    assert Encoder(tokenizer).encode(talk("in?", "no")) == Dropped(ONE_TOKEN, "f:1")
    (sample,) = Encoder(tokenizer).encode(talk("in?", "yes"))  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["y", "e", "s", "</s>"]]


def test_a_generation_prompt_whose_space_joins_the_reply_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = piece_tokenizer(ASKED_WITH_A_SPACE, marker=True)
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        (sample,) = Encoder(tokenizer).encode(talk("in?", "Paris"))  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["▁Paris", "</s>"]]
    assert "ends a prompt with ' ', which this tokenizer joins to a reply's first word" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        Encoder(piece_tokenizer(tiny.INSTRUCTION, marker=True))
    assert caplog.text == ""


OPENS_AND_CLOSES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n\n</think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Its generation prompt ends inside the line ends of an empty thought."""


def test_line_ends_shared_with_a_reply_are_not_told_as_a_joined_space(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_tokenizer(OPENS_AND_CLOSES)
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        (sample,) = Encoder(tokenizer).encode(talk("q", "r"))  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["</think>", "r", "<|end|>"]]
    assert caplog.text == ""


CLOSES_THE_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}</think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""Its generation prompt opens a thought where its replies begin with the close of one."""


def test_two_marks_that_begin_alike_are_not_cut_where_they_part() -> None:
    tokenizer = byte_tokenizer(CLOSES_THE_THOUGHT)
    (sample,) = Encoder(tokenizer).encode(talk("q", "r"))  # type: ignore[misc]
    assert trained_pieces(tokenizer, sample) == [["</think>", "r", "<|end|>"]]
