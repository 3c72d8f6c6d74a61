"""What a forward of the trainable model is called with."""

from __future__ import annotations

from typing import Any

import torch

from shardyard.data.types import IGNORE_INDEX, MicroBatch
from shardyard.device import Device


def forward_parts(batch: MicroBatch, forwards: int, *, device: Device, packed: bool) -> list[dict[str, Any]]:
    """The model's arguments for each forward of a micro-batch: one forward, or without ``packed`` one a
    document and, short of ``forwards``, fillers without a label.
    """
    ids, labels, positions = (
        tensor.to(device.torch_device, non_blocking=True)[None]
        for tensor in (batch.input_ids, batch.labels, batch.position_ids)
    )
    filler = not batch.sample_ids
    if packed:
        whole = {"input_ids": ids, "labels": labels, "position_ids": positions, "doc_lens": batch.doc_lens}
        return [whole | {"is_filler": filler}]
    columns = zip(ids.split(batch.doc_lens, 1), labels.split(batch.doc_lens, 1),
                  positions.split(batch.doc_lens, 1), strict=True)  # fmt: skip
    parts = [{"input_ids": i, "labels": y, "position_ids": p, "is_filler": filler} for i, y, p in columns]
    padding = {
        "input_ids": ids[:, :1],
        "labels": torch.full_like(labels[:, :1], IGNORE_INDEX),
        "position_ids": torch.zeros_like(positions[:, :1]),
        "is_filler": True,
    }
    return parts + [padding] * (forwards - len(parts))
