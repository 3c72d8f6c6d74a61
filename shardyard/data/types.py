"""The values that data hands from room to room: conversation -> encoded sample -> micro-batch.

Legend: T tokens of a micro-batch, D documents (attention segments) in it, n tokens of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

IGNORE_INDEX = -100
"""Label of a position that is not trained (torch's cross entropy skips it)."""


@dataclass(frozen=True)
class ToolCall:
    """One function call of an assistant turn; ``arguments`` is the parsed JSON value, never its text."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Message:
    """One turn. ``reasoning`` is a thought given apart from the content (OpenAI's ``reasoning_content``);
    ``train`` is False for a reply that is context only (``weight: 0`` or ``train: false`` in the row).
    """

    role: Literal["user", "assistant", "tool"]
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    train: bool = True


@dataclass(frozen=True)
class Conversation:
    """One row after conversion: its turns without the system message. ``where`` is ``file:line`` (or
    ``file:row``).
    """

    turns: tuple[Message, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    where: str = ""


@dataclass(frozen=True)
class PreferencePair:
    """One row of preference data: two replies to the same prompt, which ends with a user's turn or a tool's
    result. ``where`` as in ``Conversation``.
    """

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    where: str = ""

    def conversation(self, reply: Message) -> Conversation:
        """The prompt and one of the two replies."""
        return Conversation((*self.prompt, reply), self.system, self.tools, self.where)


@dataclass(frozen=True)
class Sample:
    """One tokenised training sample.

    ``input_ids`` [n] and ``labels`` [n] are int32; ``labels[t]`` is the *target* of position t, shifted once,
    here and nowhere else. A document's last token has no target (``IGNORE_INDEX``), or the token that ends a
    reply where the template leaves that to the next turn. ``doc_lens`` are the lengths of its attention
    segments (sum n): one for a conversation, several for a pretraining window with ``reset_attention_mask``.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    doc_lens: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Rows end to end, without padding; what one forward and backward reads.

    ``input_ids``, ``labels``, ``position_ids`` are int64 [T]; ``position_ids`` restart at 0 in each document;
    ``doc_lens`` (D lengths, sum T) says where attention stops. ``sample_ids`` are the dataset indices of its
    rows. A rank whose share of a global batch is empty gets a *filler*: one token without a label and no
    sample id, so that the collectives of all ranks match.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    doc_lens: tuple[int, ...]
    sample_ids: tuple[int, ...]
    num_labelled: int = field(default=0)

    @property
    def num_tokens(self) -> int:
        """Real tokens: a filler counts none."""
        return int(self.input_ids.numel()) if self.sample_ids else 0


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one global batch. All ranks hold equally many micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    start: int
    """The run's data cursor before this batch."""
    end: int
    """The cursor after it."""
    size: int
    """Units of the global batch, over all ranks: samples, or packs of samples."""
