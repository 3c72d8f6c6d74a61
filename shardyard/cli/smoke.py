"""``shardyard train FILE --smoke``: two steps, a save, a resume, an export, before the real run costs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardyard.cli.launch import Launch
from shardyard.config import Loaded, load_config
from shardyard.durable import remove_leftovers, temporary_name
from shardyard.errors import EXIT_SAVED, UserError

_STEPS = 2
_NAME = ".smoke"
_LEAST_ROWS = 64
_SIGNALLED = 128
_TOLERANCE = 1e-3
"""Relative, of the loss of the repeated step, for runs that are not deterministic."""


def smoke(loaded: Loaded, words: Sequence[str], ranks: int, launch: Launch) -> int:
    """Try the run of ``words`` beside its output_dir and print a verdict; 0 when all of it works.

    Raises:
        UserError: the run spans machines, or its folder cannot be made.
    """
    from shardyard.cli.train import RANK_COMMAND, start_ranks

    if launch.nnodes > 1:
        raise UserError("--smoke tries a run on one machine; leave out --nnodes and what belongs to it")
    parent = Path(loaded.config.training.output_dir).expanduser().resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent / _NAME)  # of a smoke test that was killed
        folder = temporary_name(parent / _NAME)
        folder.mkdir()
    except OSError as error:
        raise UserError(f"training.output_dir: {parent} cannot be written: {error.strerror}") from error
    try:
        first, second = folder / "first", folder / "resumed"
        for what, own in (
            ("two steps, two saves, an export", _overrides(loaded, first, ranks)),
            ("a resume from step 1, and the export", _resumed(loaded, first, second, ranks)),
        ):
            _say(f"smoke test: {what}")
            settings = [*words, *own]
            load_config(settings)
            if code := start_ranks([*RANK_COMMAND, *settings], ranks, launch):
                verdict = "stopped" if code == EXIT_SAVED or code > _SIGNALLED else "failed"
                _say(f"smoke test {verdict} in {what}: see above")
                return code
        code = _judge(first, second, exact=bool(loaded.config.training.deterministic))
        if loaded.config.data.eval_dataset is not None or loaded.config.data.val_size:
            _say("not tried: validation, and what follows from it")
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _overrides(loaded: Loaded, out: Path, ranks: int) -> list[str]:
    """The words that make a short run of a long one; validation and early ends are left out."""
    training = loaded.config.training
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks
    rows = max(_LEAST_ROWS, 2 * _STEPS * batch)
    values: dict[str, Any] = {
        "training.output_dir": str(out),
        "training.max_steps": _STEPS,
        "training.save_steps": 1,
        "training.save_epochs": 0,
        "training.save_total_limit": None,
        "training.save_only_model": False,
        "training.save_hf_weights": True,
        "training.export_steps": 0,
        "training.overwrite_output_dir": False,
        "training.resume_from_checkpoint": None,
        "training.resume_force": False,
        "training.eval_steps": None,
        "training.eval_on_start": False,
        "training.early_stopping_patience": None,
        "training.keep_best_checkpoint": False,
        "training.load_best_model_at_end": False,
        "training.logging_steps": 1,
        "data.eval_dataset": None,
        "data.val_size": 0,
    }
    if not loaded.config.data.streaming and loaded.config.data.data_manager_type == "lf":
        values["data.max_samples"] = min(rows, loaded.config.data.max_samples or rows)
    return [f"--{path}={_word(value)}" for path, value in values.items()]


def _resumed(loaded: Loaded, first: Path, out: Path, ranks: int) -> list[str]:
    checkpoint = first / "checkpoints" / "global_step_1"
    return [
        *_overrides(loaded, out, ranks),
        f"--training.resume_from_checkpoint={checkpoint}",
    ]


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _judge(first: Path, second: Path, *, exact: bool) -> int:
    unbroken, resumed = (_last_step(folder) for folder in (first, second))
    checkpoint = first / "checkpoints" / f"global_step_{_STEPS}"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    facts = (
        f"a step took {unbroken['step_ms'] / 1000:.2f} s, a checkpoint has {size / 2**20:,.1f} MiB, "
        f"the export is verified"
    )
    finite = all(math.isfinite(float(unbroken[key])) for key in ("loss", "grad_norm"))  # "nan" is text there
    same = finite and all(
        unbroken[key] == resumed[key]
        if exact
        else math.isclose(float(unbroken[key]), float(resumed[key]), rel_tol=_TOLERANCE)
        for key in ("loss", "grad_norm")
    )
    if not same:
        _say(
            f"smoke test failed: step {_STEPS} has loss {unbroken['loss']!r} and grad norm "
            f"{unbroken['grad_norm']!r}, and after a resume {resumed['loss']!r} and {resumed['grad_norm']!r}"
        )
        return 1
    how = "bit for bit the same" if exact else "the same up to rounding"
    _say(f"smoke test passed: step {_STEPS} after a resume is {how} (loss {resumed['loss']:.6f}); {facts}")
    return 0


def _last_step(folder: Path) -> dict[str, Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next(row for line in reversed(lines) if (row := json.loads(line)).get("step") == _STEPS)


def _say(line: str) -> None:
    print(line, flush=True)
