"""Tasks that are not ours: lm-eval's own, and those of a user's folder of YAML. Needs lm-eval."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager, _yaml_loader  # pyright: ignore[reportMissingImports]

from shardyard.errors import UserError, first_line
from shardyard.evaluate.tasks import catalog


def load_foreign(
    names: Sequence[str], folder: Path | None, num_fewshot: int | None, *, allow_code: bool = False
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Tasks by name, and the tasks of each group. Python that a YAML file names runs with ``allow_code``, or
    where lm-eval's own files name it.

    Raises:
        UserError: an unknown name, data that cannot be had, or a task that runs code outside our sandbox.
    """
    datasets.disable_progress_bars()
    with _functions(allow_code):
        tasks, groups = _load(names, folder)
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"--tasks {name}: lm-eval would run its answers as code outside a sandbox")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"--tasks {name}: it asks about pictures or sounds; models of text cannot answer")
        _set_fewshot(name, task, num_fewshot)
    return tasks, groups


@contextmanager
def _functions(allow_code: bool) -> Iterator[None]:
    """A tag may be written in many ways, and files may include others: so where lm-eval resolves it."""
    plain, own = _yaml_loader._import_func_in_yml, Path(str(lm_eval.__file__)).resolve().parent

    def guarded(qual: str, base_dir: Path) -> Any:
        if not allow_code and not base_dir.resolve().is_relative_to(own):
            raise UserError(
                f"{base_dir}: a file there names the Python {qual} (!function); allow that with "
                "--allow-code-execution"
            )
        return plain(qual, base_dir)

    _yaml_loader._import_func_in_yml = guarded
    try:
        yield
    finally:
        _yaml_loader._import_func_in_yml = plain


def _load(names: Sequence[str], folder: Path | None) -> tuple[dict[str, Any], dict[str, list[str]]]:
    manager = _manager(names, folder)
    tasks: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in manager.all_tasks:
            where = f"neither in {folder} nor one of lm-eval's" if folder else "neither ours nor lm-eval's"
            raise UserError(f"--tasks {name}: {where}; {catalog.near(name)}")
        try:
            loaded = manager.load([name])
        except UserError:
            raise
        except Exception as error:  # of every type: data sets, templates, the network
            raise UserError(f"--tasks {name}: it cannot be loaded: {first_line(error)}") from error
        tasks |= loaded["tasks"]
        if len(loaded["tasks"]) > 1:
            groups[name] = list(loaded["tasks"])
    return tasks, groups


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Of the folder alone where it has all the names: the scan of lm-eval's own takes seconds."""
    path = os.fspath(folder.expanduser()) if folder else None
    if path is not None:
        own = TaskManager(include_path=path, include_defaults=False)
        if all(name in own.all_tasks for name in names):
            return own
    return TaskManager(include_path=path)


def _set_fewshot(name: str, task: Any, num_fewshot: int | None) -> None:
    """As lm-eval does: a task whose file says 0 stays at 0."""
    stated = task.get_config("num_fewshot")
    if num_fewshot is None or stated == 0:
        task.set_config(key="num_fewshot", value=stated or 0)
        return
    if num_fewshot and not hasattr(task, "sampler"):
        raise UserError(f"--num-fewshot {num_fewshot}: {name} has no rows to show as examples")
    task.set_config(key="num_fewshot", value=num_fewshot)
