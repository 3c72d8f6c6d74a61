"""A verb's own options, taken out of its words: what is left is the configuration's.

Options are written ``--name VALUE`` or ``--name=VALUE``, and may stand anywhere. Of one that is given twice
the last wins; lists of numbers add up.
"""

from __future__ import annotations

from shardyard.errors import UserError


def take_flag(words: list[str], name: str) -> bool:
    """Remove an option without a value; whether it was there."""
    found = name in words
    words[:] = [word for word in words if word != name]
    return found


def take_text(words: list[str], name: str) -> str | None:
    """Remove an option with a value.

    Raises:
        UserError: it has no value.
    """
    value = None
    while (index := _find(words, name)) is not None:
        _, equals, text = words[index].partition("=")
        if not equals and index + 1 == len(words):
            raise UserError(f"{name} needs a value")
        value = text if equals else words[index + 1]
        del words[index : index + (1 if equals else 2)]
    return value


def take_number(words: list[str], name: str, *, default: int) -> int:
    """Remove an option whose value is a whole number from 1 on.

    Raises:
        UserError: it has another value, or none.
    """
    text = take_text(words, name)
    if text is None:
        return default
    if not _is_number(text) or int(text) < 1:
        raise UserError(f"{name} {text}: a whole number from 1 on is wanted")
    return int(text)


def take_numbers(words: list[str], name: str) -> list[int]:
    """Remove an option that takes one or more whole numbers from 0 on, as words or with commas.

    Raises:
        UserError: no number follows.
    """
    found: list[int] = []
    while (index := _find(words, name)) is not None:
        _, equals, text = words.pop(index).partition("=")
        given = [text] if equals else []
        while not equals and index < len(words) and all(map(_is_number, words[index].split(","))):
            given.append(words.pop(index))
        parts = [part.strip() for one in given for part in one.split(",")]
        if not parts or not all(map(_is_number, parts)):
            shown = text or (words[index] if index < len(words) else "")
            raise UserError(f"{name} {shown}".rstrip() + ": whole numbers from 0 on are wanted")
        found += map(int, parts)
    return found


def _find(words: list[str], name: str) -> int | None:
    return next((index for index, word in enumerate(words) if word.partition("=")[0] == name), None)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
