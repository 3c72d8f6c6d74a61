"""A run of the reference by hand: a plain loop over a transformers model, and the checkpoint it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.checkpoints import Bomb

LR = 1e-2
TRAINING = {"adam_epsilon": 1e-4, "weight_decay": 0.1}
Row = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Written:
    """What a checkpoint is written as, and what is done to it."""

    form: str = "nested"
    """``nested`` or ``flattened`` as torch makes it; ``two``: optimizers "ep" and "non_ep", flattened."""
    merged: bool = False
    """Experts [E, A, B] as [E * B, A]."""
    optimizer: bool = True
    steps_as_numbers: bool = False


def train_and_save(
    model_folder: Path, batches: Sequence[list[Row]], save_after: int, checkpoint: Path, written: Written
) -> list[float]:
    """The loss of each batch in turn; ``checkpoint`` holds the state after ``save_after`` of them."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = torch.nn.Module()
    engine.model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    engine.train()
    optimizer = make_optimizer(engine)
    losses = []
    for number, rows in enumerate(batches):
        if number == save_after:
            save(engine, optimizer, number, checkpoint, written)
        losses.append(plain_step(engine.model, optimizer, rows)[0])
    return losses


def make_optimizer(engine: Any) -> Any:
    import torch

    matrices = [p for p in engine.parameters() if p.ndim >= 2]
    vectors = [p for p in engine.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-4, foreach=False, fused=False)


def plain_step(model: Any, optimizer: Any, rows: Sequence[Row]) -> tuple[float, float]:
    """Loss and gradient norm: each row on its own, the mean over labelled tokens."""
    import torch

    labelled = sum(sum(label != -100 for label in labels) for _, labels in rows)
    total = 0.0
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits, torch.tensor(labels), ignore_index=-100, reduction="sum"
        )
        (loss / labelled).backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False).item()
    optimizer.step()
    optimizer.zero_grad()
    return total / labelled, norm


def save(engine: Any, optimizer: Any, step: int, checkpoint: Path, written: Written) -> None:
    """As REFERENCE.md 2.6 describes a folder; the options of groups are a pickle that must not be loaded."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    flat = StateDictOptions(flatten_optimizer_state_dict=written.form != "nested")
    content: dict[str, Any] = {"model": get_model_state_dict(engine)}
    if written.optimizer:
        state: Any = get_optimizer_state_dict(engine, optimizer, options=flat)
        if written.form == "nested":
            state["param_groups"] = Bomb(checkpoint.with_suffix(".ran"))
        if written.form == "two":
            sides: dict[str, Any] = {"ep": {}, "non_ep": {}}
            for key, value in state.items():
                sides["ep" if ".experts." in key else "non_ep"][key] = value
            state = sides
        content["optimizer"] = state
    dcp.save(_changed(content, written), checkpoint_id=checkpoint, no_dist=True)
    if written.optimizer:
        extra = checkpoint / "extra_state"
        extra.mkdir()
        torch.save(
            {
                "global_step": step, "_last_logged_step": step, "train_metric": {"tokens": 3},
                "lr_scheduler": {"last_epoch": step, "lr_lambdas": [None]},
                "torch_rng_state": torch.get_rng_state(),
            },
            extra / "extra_state_rank_0.pt",
        )  # fmt: skip


def _changed(value: Any, written: Written, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _changed(inner, written, key) for key, inner in value.items()}
    if written.steps_as_numbers and name.endswith("step"):
        return float(value)
    if written.merged and getattr(value, "ndim", 0) == 3:
        experts, width, depth = value.shape
        return value.transpose(1, 2).reshape(experts * depth, width).contiguous()
    return value
