"""How deep a JSON value is, without recursion: what clients send must not end a stack."""

from __future__ import annotations

from typing import Any


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects of ``value``, itself one, stand in one another more than ``levels`` deep."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
