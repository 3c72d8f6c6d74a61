"""Which device this process computes on, and what that device can tell about itself.

Every other room takes a `Device` and never names one. The CPU is a first-class device, but it is not chosen
in silence on a machine that has an accelerator.
"""

from __future__ import annotations

import glob
import os
import random
import resource
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import psutil
import torch

from shardyard.errors import UserError

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
# An empty list of visible devices is how a user of either vendor says "the CPU, please".
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class Device:
    """A kind of device and this process's index on it (0 on a CPU)."""

    type: str
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def backend(self) -> str:
        """Process-group backends: the device's own, and gloo for the small tensors that stay on the host."""
        return _BACKENDS[self.type]

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"

    @property
    def default_param_dtype(self) -> torch.dtype:
        """bf16 on an accelerator; fp32 on a CPU, where bf16 is slower."""
        return torch.bfloat16 if self.is_accelerator else torch.float32

    @property
    def _module(self):
        return getattr(torch, self.type)

    def bind(self) -> None:
        """Make this device the current one of the process."""
        if self.is_accelerator:
            self._module.set_device(self.index)

    def synchronize(self) -> None:
        if self.is_accelerator:
            self._module.synchronize()

    def seed(self, seed: int) -> None:
        """Seed every generator that a step may draw from: Python, NumPy, torch and the device."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.is_accelerator:
            self._module.manual_seed(seed)

    def peak_memory(self) -> tuple[int, int]:
        """Peak (allocated, reserved) bytes since the start; on a CPU the peak resident memory, twice."""
        if self.is_accelerator:
            return self._module.max_memory_allocated(), self._module.max_memory_reserved()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak, peak

    def free_memory(self) -> int:
        """Bytes that are free now, on a CPU for any process."""
        if self.is_accelerator:
            return self._module.mem_get_info()[0]
        return psutil.virtual_memory().available

    def set_deterministic(self, deterministic: bool) -> None:
        """Ask for kernels that give the same bits each time; one without such a kernel warns."""
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        # Filling fresh memory is meant for debugging and costs a pass over every buffer.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def visible_accelerators() -> tuple[str, int]:
    """The kind and number of accelerators that torch can use; ("cpu", 0) without one.

    Raises:
        UserError: the machine has an accelerator that torch cannot use.
    """
    if find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

        npu = torch.npu  # pyright: ignore[reportAttributeAccessIssue]
        if npu.is_available():
            return "npu", npu.device_count()
    if torch.cuda.is_available():
        return "cuda", torch.cuda.device_count()
    _refuse_unusable_hardware()
    return "cpu", 0


def _refuse_unusable_hardware() -> None:
    hidden = {kind: os.environ.get(name) == "" for kind, name in _VISIBLE.items()}
    if glob.glob("/dev/davinci[0-9]*") and not hidden["npu"]:
        cause = "torch_npu is not installed" if find_spec("torch_npu") is None else "torch_npu sees no device"
        raise UserError(
            f"no NPU found, though this machine has one: {cause}. Did you source the CANN set_env.sh and "
            f"install the "
            "torch_npu that matches your torch? To train on the CPU all the same, set "
            "ASCEND_RT_VISIBLE_DEVICES= (empty)."
        )
    if glob.glob("/dev/nvidia[0-9]*") and not hidden["cuda"]:
        cause = "this torch was built without CUDA" if torch.version.cuda is None else "CUDA does not start"
        raise UserError(
            f"no GPU found, though this machine has one: {cause}. Install the torch build for your CUDA "
            f"version. To "
            "train on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)."
        )


def local_ranks() -> int:
    """How many ranks run on this machine (1 without a launcher)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def detect_device() -> Device:
    """The device of this rank: accelerator LOCAL_RANK, or the CPU of a machine without one.

    Raises:
        UserError: more local ranks than accelerators, or an accelerator that cannot be used.
    """
    kind, count = visible_accelerators()
    if kind == "cpu":
        return Device("cpu")
    if (
        count == 1
        and os.environ.get("SLURM_GPUS_PER_TASK") == "1"
        and "TORCHELASTIC_RUN_ID" not in os.environ
    ):
        return Device(kind, 0)  # srun shows each task its own device and no other
    if local_ranks() > count:
        raise UserError(
            f"{local_ranks()} ranks were started on this machine, which has {count} {kind} device(s): start "
            f"at most "
            f"{count} ranks here (--nproc_per_node {count})."
        )
    return Device(kind, int(os.environ.get("LOCAL_RANK", "0")))
