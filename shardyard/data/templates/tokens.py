"""Text -> ids, with or without the special tokens that stand in the data's own text.

With ``split_special_tokens`` a special token that a *row* spells out is plain text, while those that the
*template* writes stay tokens. The row's are hidden before it is rendered (each becomes a private-use
character) and put back afterwards, between the template's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.joints import Joints
from shardyard.data.types import Conversation, Message, ToolCall

_PRIVATE_USE = range(0xE000, 0xF900)

Hidden = Mapping[str, str]
"""Private-use character -> the special token's text that it stands for."""


class TextTokenizer:
    """Tokenises rendered text; never adds a token that the text does not hold."""

    def __init__(self, tokenizer: Any, *, split_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._split = split_special_tokens
        added = tokenizer.added_tokens_decoder.values()
        self._special = {token.content: token for token in added if token.special}
        self._joints = Joints(tokenizer, self._plain)
        names = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._special_ids = {tokenizer.convert_tokens_to_ids(name) for name in names} - {
            tokenizer.unk_token_id
        }
        self._parts_add_up = not split_special_tokens or all(map(self._parts_text, names[:1]))

    def hide(self, conversation: Conversation) -> tuple[Conversation, Hidden]:
        """The conversation with the special tokens of its texts hidden, if they are to be split."""
        if not self._split:
            return conversation, {}
        texts = "".join(_texts(dataclasses.asdict(conversation)))
        found = sorted(set(self._pattern.findall(texts)))
        if not found:
            return conversation, {}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in texts)
        stand_ins = {token: character for token, character in zip(found, free, strict=False)}

        def swap(text: str) -> str:
            return self._pattern.sub(lambda match: stand_ins[match.group()], text)

        return _map_texts(conversation, swap), {character: token for token, character in stand_ins.items()}

    def ids(self, text: str, hidden: Hidden) -> list[int]:
        """The ids of rendered text.

        Raises:
            NotUsable: text that is not valid Unicode, or special tokens in it that cannot be split.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise NotUsable("text that is not valid Unicode (half of a surrogate pair)") from None
        if not hidden:
            return self._joints.ids(text)
        if not self._parts_add_up:
            raise NotUsable("special tokens in the text, which this tokenizer cannot split inside a template")
        if any(f"\\u{ord(character):04x}" in text.lower() for character in hidden):
            raise NotUsable("special tokens inside JSON that the chat template writes in ASCII")
        ids: list[int] = []
        position, strip_left = 0, False
        for match in chain(self._pattern.finditer(text), [None]):
            piece = text[position : match.start() if match else len(text)]
            token = self._special[match.group()] if match else None
            piece = piece.lstrip() if strip_left else piece
            piece = piece.rstrip() if token and token.lstrip else piece
            for character, spelled in hidden.items():
                piece = piece.replace(character, spelled)
            ids += self._split_ids(piece) if piece else []
            if match and token:
                ids.append(int(self._tokenizer.convert_tokens_to_ids(match.group())))
                position, strip_left = match.end(), token.rstrip
        return ids

    def boundary(self, before: str, through: str, through_ids: list[int], hidden: Hidden) -> int:
        """The index in ``through_ids`` at which the reply begins, ``before`` being all that stands before it.

        A token may hold text of both. If what it holds of the reply is white space (``\\n`` + ``\\n``) it is
        the prompt's. If what it holds of the prompt is white space (SentencePiece's ``▁Paris``) it is the
        reply's, for that is the token that a model makes after the words of the prompt.

        Raises:
            NotUsable: the token holds words, marks or markup of both.
        """
        before_ids = self.ids(before, hidden)
        if through_ids[: len(before_ids)] == before_ids:
            return len(before_ids)
        pairs = enumerate(zip(before_ids, through_ids, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), len(through_ids))
        if not through[len(before) :][:1].isspace():
            words_ids = self.ids(before.rstrip(), hidden)
            if through_ids[: len(words_ids)] == words_ids:
                return max(common, len(words_ids))
        elif self._tokenizer.is_fast and not hidden:
            offsets = self._tokenizer(through, add_special_tokens=False, return_offsets_mapping=True)[
                "offset_mapping"
            ]
            inside = [i for i, (start, _) in enumerate(offsets) if start >= len(before)]
            start = inside[0] if inside else len(offsets)
            straddled = through[len(before) : offsets[start][0]] if inside else through[len(before) :]
            if start == common + 1 and not straddled.strip():
                return start
        raise NotUsable("the prompt's last token and the reply's first are one token")

    def num_shared(self, text: str, ids: list[int], hidden: Hidden) -> int:
        """How many of ``ids`` belong to ``text``, with which theirs begins; so does a token over its end."""
        if not text:
            return 0
        own = self.ids(text, hidden)
        common = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), len(own))
        return min(common + (common < len(own)), len(ids))

    def _parts_text(self, token: str) -> bool:
        """Whether text behind a special token has the ids that it has alone (SentencePiece may put a space
        in front of a text's beginning only)."""
        alone = self._plain("a")
        return self._plain(f"a{token}a") == [*alone, self._tokenizer.convert_tokens_to_ids(token), *alone]

    def _split_ids(self, text: str) -> list[int]:
        """The ids of text in which special tokens are words as others are."""
        ids = self._plain(text, split_special_tokens=True)
        # a unigram model has them among its pieces, and finds them again
        if self._special_ids.intersection(ids):
            raise NotUsable("special tokens in the text, which this tokenizer's model does not split")
        return ids

    def _plain(self, text: str, **options: bool) -> list[int]:
        options |= {"add_special_tokens": False, "return_attention_mask": False}
        # not verbose: a text beyond model_max_length is for data.cutoff_len to cut, not for a warning
        return list(self._tokenizer(text, verbose=False, **options)["input_ids"])


def _texts(value: Any) -> list[str]:
    """All texts inside nested values, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in _texts(key) + _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


def _map_value(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_value(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_value(item, change) for item in value]
    return value


def _map_texts(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    def changed(message: Message) -> Message:
        calls = (
            ToolCall(change(call.name), _map_value(call.arguments, change)) for call in message.tool_calls
        )
        reasoning = None if message.reasoning is None else change(message.reasoning)
        return dataclasses.replace(
            message, content=change(message.content), reasoning=reasoning, tool_calls=tuple(calls)
        )

    system = None if conversation.system is None else change(conversation.system)
    return Conversation(
        tuple(changed(turn) for turn in conversation.turns),
        system,
        tuple(_map_value(tool, change) for tool in conversation.tools),
        conversation.where,
    )
