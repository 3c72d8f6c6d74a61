"""The cells of the parity matrix: layouts that must all give the numbers of one process.

Names say the data-parallel size; fsdp_size, which the cells leave to be derived, is that times cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.training import Recipe

VOCAB_SIZE = 200  # a split vocabulary has to divide by tp
FAMILIES = ("dense", "moe")


@dataclass(frozen=True)
class Cell:
    """A layout on ``world`` ranks. ``experts``: it splits experts, so a dense model has no such cell."""

    name: str
    world: int
    parallel: dict[str, Any]
    experts: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        return ("moe",) if self.experts else FAMILIES

    @property
    def stages(self) -> int:
        return self.parallel.get("pp_size", 1)


def _cell(name: str, world: int, **parallel: Any) -> Cell:
    return Cell(name, world, parallel, experts="ep_size" in parallel)


CELLS = (
    _cell("FSDP 2", 2),
    _cell("FSDP 4", 4),
    _cell("HSDP 2x2", 4, fsdp_size=2),
    _cell("TP 2", 2, tp_size=2),
    _cell("TP 4", 4, tp_size=4),
    _cell("FSDP 2 x TP 2", 4, tp_size=2),
    _cell("CP ulysses 2", 2, cp_size=2, cp_type="ulysses"),
    _cell("CP ring 2", 2, cp_size=2, cp_type="ring"),
    _cell("CP kvallgather 2", 2, cp_size=2, cp_type="kvallgather"),
    _cell("CP ring 4", 4, cp_size=4, cp_type="ring"),
    _cell("FSDP 2 x CP 2", 4, cp_size=2),
    _cell("TP 2 x CP 2", 4, tp_size=2, cp_size=2, cp_type="ring"),
    _cell("PP 2", 2, pp_size=2),
    _cell("PP 2 interleaved", 2, pp_size=2, pp_schedule="interleaved_1f1b"),
    _cell("PP 2 GPipe", 2, pp_size=2, pp_schedule="gpipe"),
    _cell("PP 2 x FSDP 2", 4, pp_size=2),
    _cell("PP 2 x TP 2", 4, pp_size=2, tp_size=2),
    _cell("PP 2 x CP 2", 4, pp_size=2, cp_size=2),
    _cell("EP 2 on FSDP 2", 2, ep_size=2),
    _cell("EP 4 on FSDP 4", 4, ep_size=4),
    _cell("EP 2 x EFSDP 2 on FSDP 4", 4, ep_size=2),
    _cell("EP 2 on HSDP 2x2", 4, fsdp_size=2, ep_size=2),
    _cell("TP 2 with EP 2", 2, tp_size=2, ep_size=2),
    _cell("CP 2 with EP 2", 2, cp_size=2, ep_size=2),
    _cell("PP 2 with EP 2 on FSDP 2", 4, pp_size=2, ep_size=2),
    _cell("FSDP 2 x TP 2 x PP 2", 8, tp_size=2, pp_size=2),
    _cell("FSDP 2 x TP 2 x PP 2 with EP 4", 8, tp_size=2, pp_size=2, ep_size=4),
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "recompute": {"recompute": True},
    "clipping": {"max_grad_norm": 0.05},
    "all": {"accumulation": 2, "recompute": True, "max_grad_norm": 0.05},
}
"""What varies beside the layout; the last is all of it at once."""


def recipe_of(cell: Cell, variant: str) -> Recipe:
    """A pipeline has one micro-batch a stage at least, so there accumulation 2 means four."""
    options = VARIANTS[variant]
    parallel = cell.parallel | {"recompute": options.get("recompute", False)}
    training = {"adam_epsilon": 1e-4, "max_grad_norm": options.get("max_grad_norm", 1e9)}
    return Recipe(
        accumulation=options.get("accumulation", 1) * cell.stages, parallel=parallel, training=training
    )


def reference_of(variant: str) -> Recipe:
    """One process, one micro-batch; clipping is all of a variant that changes the numbers."""
    training = {
        "adam_epsilon": 1e-4,
        "max_grad_norm": VARIANTS[variant].get("max_grad_norm", 1e9),
    }
    return Recipe(training=training)


def write_parity_model(folder: Path, family: str) -> Path:
    """Four layers, grouped-query attention with 8 heads on 4; the dense one ties its embedding and head."""
    from support.models import write_tiny_model

    return write_tiny_model(folder, {"dense": "parity_dense", "moe": "parity_moe"}[family])
