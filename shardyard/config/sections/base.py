"""What every section shares: a frozen model that knows only its own keys, and how a field is declared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Switch = Literal["auto"] | bool
"""An operator switch: ``auto`` lets the program choose, a boolean decides."""


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def setting(
    default: Any, meaning: str, zh: str, *, path: bool = False, keep_empty: bool = False, **limits: Any
) -> Any:
    """Declare a field with its meaning in English and Chinese.

    ``path`` marks text in which ``~`` is expanded; ``keep_empty`` marks an optional text for which the empty
    string is a value of its own (elsewhere it means null). ``limits`` are pydantic's: ``ge``, ``gt``, ``lt``.
    """
    extra: dict[str, Any] = {"zh": zh}
    if path:
        extra["path"] = True
    if keep_empty:
        extra["keep_empty"] = True
    return Field(default, description=meaning, json_schema_extra=extra, **limits)
