"""What a run needs to go on besides weights and optimizer: a few numbers, for any number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class RunState:
    """``cursor`` is the place in the data: samples passed since the run began, over all epochs and ranks.

    ``data_order`` names the sequence that the cursor counts in: samples, seed and shuffling.
    """

    data_order: str
    step: int = 0
    cursor: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    def after(self, *, cursor: int, samples: int, tokens: int) -> RunState:
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
        )

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        return cls(**{field.name: values[field.name] for field in fields(cls)})
