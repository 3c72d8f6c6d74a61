"""One update in numbers, and the log line that tools of MindSpeed-LLM users parse."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1024**3


@dataclass(frozen=True)
class StepRecord:
    """What one update did, over all ranks.

    ``loss`` is per labelled token of the global batch. ``lr`` is the rate that this update used. ``tokens``
    are the real tokens of this update, ``global_batch_size`` its samples, ``consumed_*`` the sums since the
    run began, resumed parts included. Memory is the largest peak of any rank since the start, in bytes (on a
    CPU the peak resident memory).
    """

    step: int
    total_steps: int
    consumed_samples: int
    consumed_tokens: int
    step_ms: float
    lr: float
    global_batch_size: int
    loss: float
    grad_norm: float
    tokens: int
    memory_allocated_bytes: int
    memory_reserved_bytes: int
    epoch: int = 0
    mtp_loss: float = 0.0
    loss_scale: float | None = None
    """With fp16, what the next update's loss is multiplied by; None in other precisions."""
    aux_loss: float | None = None
    """Of the balance of experts, without its coefficient; None where none is trained."""
    max_expert_load: float | None = None
    """The largest load of any expert in units of its layer's mean; None for a model without experts."""
    unused_experts: int | None = None
    """Experts, over all layers, that no token of this update reached."""


@dataclass(frozen=True)
class CpuMemory:
    """Memory of global rank 0's machine: bytes used and available, and the share in use in percent."""

    used_bytes: int
    available_bytes: int
    percent: float


def format_log_line(
    record: StepRecord, *, tokens_per_second: float | None = None, cpu_memory: CpuMemory | None = None
) -> str:
    """The line of one logging interval, each piece closed by ``|``.

    Losses and ``step_ms`` of ``record`` are the interval's means; NaN and Inf print as ``nan`` and ``inf``.
    """
    pieces = [
        f" iteration {record.step:8d}/{record.total_steps:8d} |"
        f" consumed samples: {record.consumed_samples:10d} | consumed tokens: {record.consumed_tokens:10d} |"
        f" elapsed time per iteration (ms): {record.step_ms:.2f} |"
    ]
    if tokens_per_second is not None:
        pieces.append(f" tokens/s: {tokens_per_second:.2f} |")
    pieces.append(
        f" learning rate: {record.lr:.6E} | global batch size: {record.global_batch_size:5d} |"
        f" lm loss: {scientific(record.loss)} | mtp loss: {scientific(record.mtp_loss)} |"
    )
    if record.aux_loss is not None:
        pieces.append(f" aux loss: {scientific(record.aux_loss)} |")
    if record.loss_scale is not None:
        pieces.append(f" loss scale: {record.loss_scale:.1f} |")
    pieces.append(
        f" grad norm: {record.grad_norm:.3f} |"
        f" max_memory_allocated(GB): {record.memory_allocated_bytes / _GIB:.2f} |"
        f" max_memory_reserved(GB): {record.memory_reserved_bytes / _GIB:.2f} |"
    )
    if cpu_memory is not None:
        pieces.append(
            f" cpu_used_memory(GB): {cpu_memory.used_bytes / _GIB:.2f} |"
            f" cpu_available_memory(GB): {cpu_memory.available_bytes / _GIB:.2f} |"
            f" cpu_memory_usage(%): {cpu_memory.percent:.1f} |"
        )
    return "".join(pieces)


def scientific(value: float) -> str:
    """Seven digits, as the lines print losses; ``nan`` and ``inf`` in small letters."""
    # "E" alone would print NAN and INF in capitals.
    return f"{value:.6E}".replace("NAN", "nan").replace("INF", "inf")
