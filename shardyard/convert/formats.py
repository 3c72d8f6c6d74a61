"""What a folder of weights is: Hugging Face, DCP or Megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shardyard.checkpoint.folder import complete, step_of
from shardyard.convert.places import weight_files
from shardyard.errors import UserError
from shardyard.models.converted import is_megatron

Form = Literal["hf", "dcp", "mcore"]
NAMES: dict[Form, str] = {
    "hf": "a Hugging Face model",
    "dcp": "a DCP checkpoint",
    "mcore": "a Megatron-core checkpoint",
}


def form_of(folder: Path, stated: Form | None = None) -> Form:
    """The format of ``folder``, or ``stated``, if it can be that.

    Raises:
        UserError: it is none of them; a folder of checkpoints names the one that was probably meant.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = _found(folder)
    if stated is not None and found not in (stated, None):
        raise UserError(f"--from: {folder} is {NAMES[found]}, not {NAMES[stated]}")
    if found is None:
        held = sorted(path.name for path in folder.iterdir())
        shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
        raise UserError(
            f"{folder} holds no weights that are known here ({shown or 'it is empty'}). There are Hugging "
            "Face folders (config.json and *.safetensors or pytorch_model*.bin), DCP checkpoints (.metadata "
            "and *.distcp, as output_dir/checkpoints/global_step_N) and Megatron-core ones "
            f"(latest_checkpointed_iteration.txt){_hint(folder)}"
        )
    return found


def _found(folder: Path) -> Form | None:
    if is_megatron(folder):  # torch_dist has a .metadata too
        return "mcore"
    if (folder / ".metadata").is_file():
        return "dcp"
    return "hf" if weight_files(folder) else None


def _hint(folder: Path) -> str:
    """A checkpoint within, as of a run's folder; or what the folder holds instead of a model."""
    if next(folder.glob("adapter_model*"), None):
        return "; an adapter is not converted by itself: merge it into its model first"
    whole = complete(folder / "checkpoints") or complete(folder)
    if not whole:
        plain = [path for path in folder.glob("**/global_step_*") if (path / ".metadata").is_file()]
        whole = sorted(plain, key=lambda path: step_of(path) or 0)
    return f"; did you mean {whole[-1]}?" if whole else ""
