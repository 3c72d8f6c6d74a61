"""How a template writes thoughts and calls. White space at the ends of the pieces is not part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CallFormat:
    """``lead`` (``open`` call ``close``)* ``tail``, any of them empty.

    A call is by ``kind``

    - ``json``: an object with name and arguments (Hermes, Qwen, Llama, Mistral);
    - ``named``: the name, ``middle``, the arguments as JSON (DeepSeek);
    - ``fields``: the name, ``middle``, and for each argument ``key_open`` key ``value_open`` value
      ``value_close`` (GLM, Qwen3-Coder). Texts are written as they are, other values as JSON.
    """

    kind: Literal["json", "named", "fields"]
    lead: str = ""
    open: str = ""
    middle: str = ""
    close: str = ""
    tail: str = ""
    key_open: str = ""
    value_open: str = ""
    value_close: str = ""
    pads: tuple[str, str] = ("", "")
    """White space that the template puts around a value."""
    joint: str = ""
    """White space that it puts between words and calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What calls begin with; empty where a reply that is JSON is one."""
        return tuple(dict.fromkeys(mark for mark in (self.lead, self.open) if mark))


HERMES = CallFormat("json", open="<tool_call>", close="</tool_call>", joint="\n")
"""What most models were trained on whose template only reads calls."""


@dataclass(frozen=True)
class ReplyFormat:
    """``calls`` is None where the model is not told how to call."""

    calls: CallFormat | None = None
    thought: tuple[str, str] = ("<think>", "</think>")

    @property
    def marks(self) -> tuple[str, ...]:
        """The markup that the parser has to see, though it may be special tokens: `TextStream`'s ``keep``."""
        calls = self.calls
        if calls is None:
            return self.thought
        pieces = (
            calls.lead, calls.open, calls.middle, calls.close, calls.tail, calls.key_open, calls.value_open,
            calls.value_close,
        )  # fmt: skip
        return (*self.thought, *(piece for piece in pieces if piece))

    def opens_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends where a thought begins."""
        return prompt.rstrip().endswith(self.thought[0])

    def is_inside_thought(self, content: str) -> bool:
        """Whether the beginning of a reply ends inside its thought."""
        return content.lstrip().startswith(self.thought[0]) and self.thought[1] not in content
