"""The folder of a run: looked at before anything costs time, written to when all else is right."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from shardyard.checkpoint import CheckpointStore, check_output_dir, prepare_output_dir
from shardyard.checkpoint.exported import is_exported
from shardyard.checkpoint.folder import named
from shardyard.checkpoint.manifest import RUN_STATE, ManifestError, damage, read_manifest, read_run_state
from shardyard.checkpoint.reference import check_reference, is_reference, newest_reference
from shardyard.config import Config, Loaded
from shardyard.config.resolved import dump_yaml
from shardyard.device import restarted_since
from shardyard.durable import remove_leftovers, temporary_name, write_durably
from shardyard.errors import UserError
from shardyard.train.differences import RunFacts, changes_the_outcome

logger = logging.getLogger("shardyard.train")
_CLAIM = "resolved_config.yaml"


def look_at_output_dir(config: Config) -> str:
    """Where to resume from ("" for a new run); on global rank 0 only."""
    store = _store(config)
    wanted = _wanted(config, store)
    if wanted:
        store.clean()  # a save of a step again may have been killed between its two names
    found = _found(store, wanted) if wanted else None
    check_output_dir(**_folder_facts(config))
    if wanted == "latest" and found is None:
        if damaged := named(store.folder):
            raise UserError(
                f"training.resume_from_checkpoint: latest, but {damaged[-1]} is not complete, and neither is "
                f"another one in {store.folder} (`shardyard checkpoint verify` tells more); move the folder "
                "away to start at step 0"
            )
        logger.info("resume_from_checkpoint: latest, but %s is empty yet: starting at step 0", store.folder)
    return str(found or "")


def _found(store: CheckpointStore, wanted: str) -> Path | None:
    """As `CheckpointStore.resolve`; a checkpoint of the reference is one too, if it is named by its path."""
    path = Path(wanted).expanduser()
    if wanted != "latest" and is_reference(path):
        check_reference(path)
        return path
    try:
        return store.resolve(wanted)
    except UserError as error:
        inside = newest_reference(path)
        if inside is None:
            raise
        raise UserError(f"{error}; did you mean {inside}?") from error


def goes_on_from_latest(config: Config) -> bool:
    """Whether the newest checkpoint is meant, whichever it is, and not one by its name."""
    return _wanted(config, _store(config)) == "latest"


def _store(config: Config) -> CheckpointStore:
    return CheckpointStore(Path(config.training.output_dir), save_total_limit=None)


def _wanted(config: Config, store: CheckpointStore) -> str | None:
    """``resume_from_checkpoint``, or ``latest`` once this launch has saved something and is started again."""
    wanted, since = config.training.resume_from_checkpoint, _claimed_since(config)
    newest = store.latest() if since is not None else None
    if since is None or newest is None or wanted == "latest":
        return wanted
    is_own = wanted is not None and Path(wanted).resolve().parent == store.folder.resolve()
    if is_own and (newest / "manifest.json").stat().st_mtime < since:
        return wanted  # sent back to an earlier checkpoint, the run has not saved any of its own yet
    logger.info("started again after a fault: going on from %s", newest)
    return "latest"


def _claimed_since(config: Config) -> float | None:
    """When this launch began, if an earlier start of it has already made the folder its own."""
    since, claim = restarted_since(), Path(config.training.output_dir, _CLAIM)
    return since if since is not None and claim.exists() and claim.stat().st_mtime >= since else None


def nothing_left(config: Config, resume_from: str, ranks: int) -> str:
    """ "yes" if the checkpoint ``resume_from`` ends the run that ``config`` asks for and its export is there;
    else "". Nothing but JSON is read; whatever is not plain is left to the run itself.
    """
    if not resume_from or is_reference(Path(resume_from)):
        return ""
    state = _state_as_written(Path(resume_from))
    if state is None:
        return ""
    before, training = RunFacts.from_json(state.get("settings", {})), config.training
    if before.schedule is None or before.ranks != ranks or state["step"] < before.schedule["total"]:
        return ""
    if changes_the_outcome(before, RunFacts.of(config)):
        return ""
    done = not training.save_hf_weights or is_exported(Path(training.output_dir), state["step"])
    return "yes" if done else ""


def _state_as_written(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint holds besides tensors; None where it has changed since, which resuming tells."""
    try:
        if damage(checkpoint, [RUN_STATE], read_manifest(checkpoint).files):
            return None
        return read_run_state(checkpoint)
    except (ManifestError, KeyError, UserError):
        return None


def _folder_facts(config: Config) -> dict[str, Any]:
    """How this run means to use its folder, as `check_output_dir` asks."""
    training, model = config.training, config.model
    output_dir = Path(training.output_dir)
    wanted = training.resume_from_checkpoint
    # A checkpoint of another run may begin this one, but not in a folder that holds a third.
    own = wanted == "latest" or (
        wanted is not None and Path(wanted).resolve().parent == (output_dir / "checkpoints").resolve()
    )
    paths = (model.model_name_or_path, model.config_name_or_path, model.tokenizer_name_or_path)
    inputs = [*(Path(path) for path in paths if path), *map(Path, config.data.dataset_names)]
    return {
        "output_dir": output_dir,
        "resuming": own or _claimed_since(config) is not None,
        "overwrite": training.overwrite_output_dir,
        "inputs": [path.expanduser() for path in inputs],
    }


def claim_output_dir(loaded: Loaded) -> str:
    """Make the folder this run's own and leave its settings there; on global rank 0 only."""
    moved = prepare_output_dir(**_folder_facts(loaded.config))
    if moved is not None:
        logger.info("the old run was moved to %s", moved)
    _store(loaded.config).clean()
    path = Path(loaded.config.training.output_dir, _CLAIM)
    _write_whole(path, dump_yaml(loaded.config, loaded.origins))
    os.utime(path)  # by the clock of this machine, which also says when the launch began
    return str(path)


def give_back_output_dir(config: Config) -> None:
    """Take the settings away again, where nothing else stands in the folder: no run is to be seen there."""
    folder = Path(config.training.output_dir)
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [_CLAIM]:
            (folder / _CLAIM).unlink()


def _write_whole(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, or leave there what is: the settings of the run so far."""
    remove_leftovers(path)
    temporary = temporary_name(path)
    try:
        write_durably(temporary, text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"training.output_dir: {path} cannot be written: {error.strerror}") from error
