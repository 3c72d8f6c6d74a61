"""Does any layout change the mathematics? Each cell of the parity matrix against one process.

    python benchmarks/parity.py                      # every layout, accumulation 2, recompute, clipping
    python benchmarks/parity.py --only "TP 2" --variant plain

Five AdamW steps in fp32 on rows of unequal length, on the CPU with gloo; the ranks of a cell are processes of
one thread each. The columns are the largest relative differences: of a step's loss, of its gradient norm,
and, over all tensors, max|difference| / max|reference| of the first gradients and of the final weights.
The cells are those of tests/parallel/test_parity_matrix.py, which holds each number to 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.parity import CELLS, VARIANTS, Cell, recipe_of, reference_of, write_parity_model
from support.ranks import RankPool
from support.training import Outcome, largest_relative_difference, make_rows, train_rows

BOUND = 1e-5


def main() -> int:
    options = _options()
    cells = [cell for cell in CELLS if options.only is None or cell.name == options.only]
    if not cells:
        print(
            f"--only {options.only!r}: the cells are {', '.join(cell.name for cell in CELLS)}",
            file=sys.stderr,
        )
        return 2
    print(f"variant {options.variant}: {VARIANTS[options.variant] or 'nothing beside the layout'}\n")
    print("| layout | ranks | model | loss | grad norm | first gradients | weights after 5 | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        pool, references = RankPool(), {}
        for cell in cells:
            for family in cell.families:
                folder = Path(root) / family
                if family not in references:
                    write_parity_model(folder, family)
                    recipe = reference_of(options.variant)
                    references[family] = pool.run(1, train_rows, folder, make_rows(), recipe)[0]
                worst = max(
                    worst, _print_cell(pool, cell, family, folder, references[family], options.variant)
                )
    print(f"\nworst {worst:.1e}, bound {BOUND:.0e}: {'equal' if worst <= BOUND else 'NOT EQUAL'}")
    return 0 if worst <= BOUND else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=list(VARIANTS), default="all")
    parser.add_argument("--only", metavar="CELL", help="one layout, by its name in the table")
    return parser.parse_args()


def _print_cell(pool: Any, cell: Cell, family: str, folder: Path, reference: Outcome, variant: str) -> float:
    started = time.perf_counter()
    recipe = recipe_of(cell, variant)
    ours: Outcome = pool.run(cell.world, train_rows, folder, make_rows(), recipe, timeout_s=600)[0]
    differences = (
        _largest(ours.losses, reference.losses),
        _largest(ours.norms, reference.norms),
        largest_relative_difference(ours.first_grads, reference.first_grads),
        largest_relative_difference(ours.weights, reference.weights),
    )
    shown = " | ".join(f"{difference:.1e}" for difference in differences)
    seconds = time.perf_counter() - started
    print(f"| {cell.name} | {cell.world} | {family} | {shown} | {seconds:.0f} |", flush=True)
    return max(differences)


def _largest(ours: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


if __name__ == "__main__":
    sys.exit(main())
