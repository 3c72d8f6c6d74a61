"""One rank prepares the data, the others wait for word of it, without a collective that could time out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from shardyard.errors import UserError


class Rendezvous(Protocol):
    """Hands a text from one rank to others; ``wait`` blocks, and says so in the log meanwhile."""

    def publish(self, key: str, value: str) -> None: ...

    def wait(self, key: str) -> str: ...


@dataclass(frozen=True)
class Role:
    """A rank's part in preparing the data: one leader in each group of ranks that share files works."""

    is_leader: bool = True
    group: int = 0
    num_groups: int = 1

    @classmethod
    def of(
        cls, *, rank: int, local_rank: int, node_rank: int, num_nodes: int, shared_file_system: bool
    ) -> Role:
        """All ranks are one group with ``data.data_shared_file_system``, else each node is one."""
        if shared_file_system:
            return cls(is_leader=rank == 0)
        return cls(is_leader=local_rank == 0, group=node_rank, num_groups=num_nodes)


@dataclass(frozen=True)
class PreparedSet:
    """Where a leader has put one data set.

    ``samples`` is a folder of tokenised samples, ``documents`` one of tokenised documents; ``indexed`` is a
    prefix of .bin/.idx that was there before, ``packed`` one of packed fine-tuning files. ``report`` counts
    its rows (``Report.to_json``).
    """

    kind: Literal["samples", "documents", "indexed", "packed"]
    name: str
    path: str
    report: dict[str, Any]
    weight: float | None = None


@dataclass(frozen=True)
class Prepared:
    """All data sets of a run, and the key of their content."""

    key: str
    sets: tuple[PreparedSet, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Prepared:
        return cls(values["key"], tuple(PreparedSet(**one) for one in values["sets"]))


def prepare_once(
    prepare: Callable[[], Prepared], role: Role, rendezvous: Rendezvous | None, name: str
) -> Prepared:
    """Run ``prepare`` on the leaders; every rank gets its own group's result.

    Raises:
        UserError: on every rank of the run, when one leader failed or two groups hold different data.
    """
    if rendezvous is None:
        if not role.is_leader or role.num_groups > 1:
            raise ValueError("several ranks need a rendezvous")
        return prepare()
    if role.is_leader:
        _prepare_and_tell(prepare, rendezvous, f"data/{name}/{role.group}")
    results = []
    for group in range(role.num_groups):
        told = json.loads(rendezvous.wait(f"data/{name}/{group}"))
        if "error" in told:
            raise UserError(told["error"])
        results.append(Prepared.from_json(told))
    for group, result in enumerate(results):
        if result.key != results[0].key:
            raise UserError(
                f"data.dataset: node {group} prepared other samples than node 0 (keys {result.key} and "
                f"{results[0].key}); its files, tokenizer or program differ: make them equal"
            )
    return results[role.group]


def _prepare_and_tell(prepare: Callable[[], Prepared], rendezvous: Rendezvous, key: str) -> None:
    try:
        prepared = prepare()
    except BaseException as error:
        told = str(error) if isinstance(error, UserError) else f"the rank that prepares the data: {error!r}"
        rendezvous.publish(key, json.dumps({"error": told}))
        raise
    rendezvous.publish(key, json.dumps(prepared.to_json()))
