"""Patterns that name modules: `{*}` digits, `{a-b}` a range of them, `*` any text, `?` one character."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch.nn as nn

from shardyard.errors import UserError

logger = logging.getLogger("shardyard.parallel")

_TOKEN = re.compile(r"\{(?P<brace>[^{}]*)\}|(?P<star>\*)|(?P<any>\?)|(?P<text>[^{}*?]+)|(?P<bad>[{}])")
_RANGE = re.compile(r"(\d+)-(\d+)")


@lru_cache(maxsize=512)
def _compile(pattern: str) -> tuple[re.Pattern[str], tuple[tuple[int, int], ...]]:
    pieces: list[str] = []
    ranges: list[tuple[int, int]] = []
    for token in _TOKEN.finditer(pattern):
        brace = token["brace"]
        if brace == "*":
            pieces.append(r"\d+")
        elif brace is not None and (bounds := _RANGE.fullmatch(brace)):
            pieces.append(r"(\d+)")
            ranges.append((int(bounds[1]), int(bounds[2])))
        elif brace is not None or token["bad"]:
            raise UserError(f"module pattern {pattern!r}: braces hold `*` or a range such as `{{0-3}}`")
        elif token["star"]:
            pieces.append(".*")
        elif token["any"]:
            pieces.append(".")
        else:
            pieces.append(re.escape(token["text"]))
    return re.compile("".join(pieces)), tuple(ranges)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names the whole of ``name``.

    Raises:
        UserError: a brace holds something else than `*` or a range.
    """
    regex, ranges = _compile(pattern)
    found = regex.fullmatch(name)
    return found is not None and all(
        low <= int(digits) <= high for digits, (low, high) in zip(found.groups(), ranges, strict=True)
    )


def select(patterns: Sequence[str] | None, names: Iterable[str], *, key: str) -> list[str]:
    """The names that any pattern matches, in the order of ``names``; a pattern that matches none warns.

    Raises:
        UserError: no pattern matches anything, with ``key`` and the names that exist.
    """
    names, patterns = list(names), list(patterns or ())
    unmatched = [p for p in patterns if not any(matches(p, name) for name in names)]
    if unmatched and len(unmatched) == len(patterns):
        shown = ", ".join(dict.fromkeys(re.sub(r"\d+", "{*}", name) for name in names if name))
        raise UserError(
            f"{key}: {', '.join(patterns)} matches nothing in this model, which has: {shown[:600]}"
        )
    for pattern in unmatched:
        logger.warning("%s: %s matches nothing in this model", key, pattern)
    return [name for name in names if any(matches(p, name) for p in patterns)]


def select_modules(
    model: nn.Module, patterns: Sequence[str] | None, *, key: str
) -> list[tuple[str, nn.Module]]:
    """The modules that any pattern matches, parents before children.

    Of a pipeline stage, those that it holds; a pattern that names another stage's modules is no mistake.
    """
    modules = dict(model.named_modules())
    stage = getattr(model, "_pp_stage", None)
    names = modules if stage is None else stage.whole.modules
    return [(name, modules[name]) for name in select(patterns, names, key=key) if name in modules]
