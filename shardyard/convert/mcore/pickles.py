"""Loading Megatron's ``.pt`` files without running anything that they hold.

torch's own tensors-only loader does not read pickles of protocol 4, which these files are, nor what files of
a training run hold (enums of megatron, numpy scalars, optimizer objects). The unpickler here knows the few
names that rebuild tensors, and puts an inert stand-in for every other name of a list of packages. Nothing is
imported, nothing that a file names is called; a name outside the list is refused.
"""

from __future__ import annotations

import argparse
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardyard.errors import UserError, first_line

_DTYPES = {
    ("torch", str(value).removeprefix("torch."))
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_REAL = {
    ("argparse", "Namespace"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
    ("torch.storage", "UntypedStorage"),
    *_DTYPES,
}
_INERT_PACKAGES = {
    "apex", "copyreg", "datetime", "enum", "megatron", "mindspeed", "mindspeed_llm", "numpy", "pathlib",
    "signal", "torch", "torch_npu", "transformer_engine", "types", "typing",
}  # fmt: skip
_INERT = {("_codecs", "encode"), ("_io", "BytesIO"), ("builtins", "getattr"), ("builtins", "object"),
          ("functools", "partial")}  # fmt: skip


class Inert:
    """Stands where a file holds an object of another package; takes everything and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Arguments of the class it stands for."""

    def __setstate__(self, _: Any) -> None:
        """The state of an object."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """Entries of a mapping."""

    def append(self, _: Any) -> None:
        """An item of a list."""

    def extend(self, _: Any) -> None:
        """Items of a list."""

    def add(self, _: Any) -> None:
        """An item of a set."""

    def __call__(self, *_: Any, **__: Any) -> Inert:
        return Inert()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REAL:
            return super().find_class(module, name)
        if module.split(".")[0] in _INERT_PACKAGES or (module, name) in _INERT:
            return Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


_PICKLE_MODULE = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)


def load_pt(path: Path) -> Any:
    """What a ``.pt`` file holds, its tensors mapped from the disk and not yet read.

    Raises:
        UserError: it is missing, damaged, of torch's old format, or names what no checkpoint needs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.filename.endswith("/constants.pkl") for entry in archive.infolist()):
                raise UserError(f"{path} is not read: it is a TorchScript program")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not read: it is damaged or no file of torch.save ({error})") from error
    try:
        # not tensors-only to torch, but to the unpickler above, which is all that reads the pickle
        return torch.load(
            path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLE_MODULE
        )
    except Exception as error:  # damaged pickles raise nearly anything
        raise UserError(f"{path} is not read: {first_line(error)}") from error


def plain_arguments(content: Any) -> dict[str, Any]:
    """The arguments that a checkpoint carries, without stand-ins; empty if it carries none."""
    arguments = content.get("args") if isinstance(content, dict) else None
    if not isinstance(arguments, argparse.Namespace):
        return {}
    return {key: value for key, value in vars(arguments).items() if not isinstance(value, Inert)}
