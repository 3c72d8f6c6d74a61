"""Every transformation of the model, in order, in one function.

The model arrives on the meta device, before its weights are read, and leaves with every parameter a DTensor.
"""

from __future__ import annotations

from typing import Any

from shardyard.config import ParallelConfig
from shardyard.device import Device
from shardyard.parallel.chunks import apply_chunks
from shardyard.parallel.compile import EAGER, Compilation, apply_compile
from shardyard.parallel.experts.split import apply_expert_parallel
from shardyard.parallel.fsdp import apply_fsdp, take_notes_off
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.offload import apply_offload
from shardyard.parallel.recompute import apply_recompute
from shardyard.parallel.tensor import apply_tensor_parallel


def apply_parallelism(
    model: Any,
    parallel: ParallelConfig,
    meshes: Meshes,
    device: Device,
    compilation: Compilation = EAGER,
) -> Any:
    """Split layers, split experts, what is compiled, computed again, kept on the host, run by pieces, shards.

    Context parallelism is not here: it changes no module, only what a rank's forward reads and how its
    attention works (parallel/sequence.py, ops/context). Pipeline stages are cut when a model is constructed
    (parallel/pipeline).

    Raises:
        UserError: a list of patterns that matches nothing, or a model that cannot be split as asked.
    """
    if meshes.layout.tp > 1:
        apply_tensor_parallel(model, parallel, meshes)
    if meshes.layout.ep > 1:
        apply_expert_parallel(model, parallel, meshes)
    apply_compile(model, compilation)
    apply_recompute(model, parallel)
    apply_offload(model, parallel, meshes, device)
    apply_chunks(model, parallel, meshes)
    apply_fsdp(model, parallel, meshes, device)
    if not compilation:  # compiled code has no operators that leave notes
        take_notes_off(model)
    return model
