"""Conversations -> samples: template, cut to the cut-off, labels.

Labels are made by position, never by value, so a token that is both padding and end of text keeps its label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardyard.data.dropped import Dropped, NotUsable
from shardyard.data.store import FLAG_LOST_THOUGHT, FLAG_TRUNCATED
from shardyard.data.templates import Turn, build_template
from shardyard.data.types import IGNORE_INDEX, Conversation, Sample

if TYPE_CHECKING:
    from shardyard.config import Config


TRUNCATED = "cut to data.cutoff_len"
LOST_THOUGHT = "a thought left out by the chat template"


class Samples(list[Sample]):
    """The samples of one conversation; ``truncated`` if any token of it was cut off. ``notes`` say all that
    was left out of them, in words to count by; ``flags``, of each sample, what was left out of it (those of
    the store; none at all if nothing was).
    """

    truncated: bool = False
    notes: tuple[str, ...] = ()
    flags: Sequence[int] = ()


class Encoder:
    """Encodes conversations by the settings of ``data``; can be sent to other processes.

    A sample has at most ``cutoff_len`` tokens. With the named template every turn is cut in proportion
    (``cut_each_turn``); with the tokenizer's own the end of the sample is cut off. Reply tokens that are left
    stay trained, no end token is made up, and a sample without any trained token is dropped.

    Replies are trained unless the row gives them as context only. ``mask_history`` trains the last of these
    replies only and leaves out what follows it; ``train_on_prompt`` trains all prompts as well, each once: of
    a conversation that becomes several samples, what stood in an earlier one is context in the next.

    Raises:
        UserError: see ``build_template``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        cutoff_len: int = 2048,
        train_on_prompt: bool = False,
        mask_history: bool = False,
        enable_thinking: bool | None = True,
        default_system: str | None = None,
        tool_format: str | None = None,
        split_special_tokens: bool = False,
        write_stops: bool = False,
    ) -> None:
        self._write_stops = write_stops
        self._template = build_template(
            template,
            tokenizer,
            enable_thinking=enable_thinking,
            default_system=default_system,
            tool_format=tool_format,
            split_special_tokens=split_special_tokens,
            train_on_prompt=train_on_prompt,
        )
        self._cutoff_len = cutoff_len
        self._train_on_prompt = train_on_prompt
        self._mask_history = mask_history

    @classmethod
    def from_config(cls, config: Config, tokenizer: Any) -> Encoder:
        """The encoder of a run; ``tokenizer`` from ``load_tokenizer``."""
        data = config.data
        return cls(
            tokenizer,
            template=data.template,
            cutoff_len=data.cutoff_len,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
            enable_thinking=data.enable_thinking,
            default_system=data.default_system,
            tool_format=data.tool_format,
            split_special_tokens=config.model.split_special_tokens,
        )

    def encode(self, conversation: Conversation) -> Samples | Dropped:
        """The samples of a conversation (usually one), or why there are none."""
        try:
            parts = self._template.encode(conversation)
        except NotUsable as error:
            return Dropped(str(error), conversation.where)
        if self._mask_history:
            parts = _to_last_trained(parts)
        samples = Samples()
        notes: set[str] = set()
        flags: list[int] = []
        for turns in parts:
            kept = self._cut(turns)
            cut = _num_tokens(kept) < _num_tokens(turns)
            if cut:
                notes.add(TRUNCATED)
            sample = self._label(kept)
            if (sample.labels != IGNORE_INDEX).any():
                samples.append(sample)
                lost = any(turn.lost_thought and turn.trained for turn in kept)
                if lost:
                    notes.add(LOST_THOUGHT)
                flags.append(FLAG_TRUNCATED * cut | FLAG_LOST_THOUGHT * lost)
        samples.truncated, samples.notes, samples.flags = TRUNCATED in notes, tuple(sorted(notes)), flags
        if not samples:
            reason = "no trained token" + (" left within data.cutoff_len" if samples.truncated else "")
            return Dropped(reason, conversation.where)
        return samples

    def _cut(self, turns: list[Turn]) -> list[Turn]:
        if self._template.cut == "end":
            return cut_end(turns, self._cutoff_len)
        return cut_each_turn(turns, self._cutoff_len, last_first=self._mask_history)

    def _label(self, turns: list[Turn]) -> Sample:
        input_ids: list[int] = []
        trained: list[bool] = []
        for turn in turns:
            input_ids += turn.prompt + turn.reply
            context = min(turn.context, len(turn.prompt))
            trained += [False] * context + [self._train_on_prompt] * (len(turn.prompt) - context)
            trained += [turn.trained] * len(turn.reply)
        stop = turns[-1].stop if turns and turns[-1].trained else None
        if stop is not None and self._write_stops and len(input_ids) < self._cutoff_len:
            return shifted([*input_ids, stop], [*trained, True])
        sample = shifted(input_ids, trained)
        if stop is not None and not self._write_stops:
            sample.labels[-1] = stop
        return sample


def _to_last_trained(parts: list[list[Turn]]) -> list[list[Turn]]:
    """The sample that holds the last trained reply, up to it: nothing later can bear on its loss. Earlier
    replies are context.
    """
    for turns in reversed(parts):
        for last in reversed(range(len(turns))):
            if turns[last].trained:
                return [[*(turn._replace(trained=False) for turn in turns[:last]), turns[last]]]
    return []


def shifted(input_ids: list[int], trained: list[bool]) -> Sample:
    """One document whose position t predicts token t + 1 where that token is trained."""
    ids = np.array(input_ids, dtype=np.int32)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    if len(ids) > 1:
        labels[:-1] = np.where(np.array(trained[1:], dtype=bool), ids[1:], IGNORE_INDEX)
    return Sample(ids, labels, (len(ids),))


def cut_end(turns: Iterable[Turn], room: int) -> list[Turn]:
    """The first ``room`` tokens of a sample."""
    kept: list[Turn] = []
    for turn in turns:
        if room <= 0:
            break
        prompt = turn.prompt[:room]
        reply = turn.reply[: room - len(prompt)]
        room -= len(prompt) + len(reply)
        kept.append(_shortened(turn, prompt, reply))
    return kept


def cut_each_turn(turns: list[Turn], room: int, *, last_first: bool = False) -> list[Turn]:
    """Turn by turn within the room that is left (``share_room``); turns after the room is used are left out.

    ``last_first`` begins with the last turn, which is the one that ``mask_history`` trains.
    """
    kept: list[Turn] = []
    for turn in reversed(turns) if last_first else turns:
        if room <= 0:
            break
        prompt_len, reply_len = share_room(len(turn.prompt), len(turn.reply), room)
        kept.append(_shortened(turn, turn.prompt[:prompt_len], turn.reply[:reply_len]))
        room -= prompt_len + reply_len
    return kept[::-1] if last_first else kept


def _shortened(turn: Turn, prompt: list[int], reply: list[int]) -> Turn:
    """The turn with what is left of it; a reply that was cut has no end to be trained."""
    stop = turn.stop if len(reply) == len(turn.reply) else None
    return turn._replace(prompt=prompt, reply=reply, stop=stop)


def share_room(prompt_len: int, reply_len: int, room: int) -> tuple[int, int]:
    """How many tokens of a prompt and its reply stay (LLaMA-Factory's ``infer_seqlen``).

    The shorter of the two is spared if it is less than half of the room, else both shrink in proportion.
    """
    if 2 * reply_len < room:
        reply_room = room
    elif 2 * prompt_len < room:
        reply_room = room - prompt_len
    else:
        reply_room = int(room * (reply_len / (prompt_len + reply_len)))
    kept_reply = min(reply_room, reply_len)
    return min(max(room - kept_reply, 0), prompt_len), kept_reply


def _num_tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.prompt) + len(turn.reply) for turn in turns)
