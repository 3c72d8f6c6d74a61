"""The step's own promises: no NaN passes, randomness follows from the step, empty shares are harmless."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, whole


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "m", "qwen3")


def with_a_nan_on_rank_one(folder, on_nonfinite):
    """Rank 1's second forward gives NaN: a hook on the root multiplies its loss."""
    import torch.distributed as dist

    built, step, meshes = build_step(folder, Recipe(training={"on_nonfinite": on_nonfinite}))
    batches = micro_batches_of(make_rows(), 2, meshes.dp_rank, meshes.dp_size)
    before = whole(dict(built.model.named_parameters()))
    calls = []

    def poison(module, args, output):
        calls.append(None)
        return output * float("nan") if dist.get_rank() == 1 and len(calls) == 2 else output

    handle = built.model.register_forward_hook(poison)
    try:
        message = step(batches, step=7, lr=1e-2).skipped
    except Exception as error:
        message = f"{type(error).__name__} {error}"
    handle.remove()
    after = whole(dict(built.model.named_parameters()))
    same = all(np.array_equal(before[n], after[n]) for n in before)
    return message, same, len(step.optimizer.state), step(batches, step=8, lr=1e-2).skipped


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_nan_stops_or_skips_on_every_rank_before_the_optimizer_moves(ranks, folder, policy):
    outcomes = ranks.run(2, with_a_nan_on_rank_one, folder, policy)
    # Rank 1 has the odd rows; the second half of its eight is 9, 11, 13, 15.
    wanted = "step 7: the loss is NaN or Inf on rank 1, micro-batch 2, samples [9, 11, 13, 15]"
    for message, unchanged, states, next_step in outcomes:
        assert message == (wanted if policy == "skip" else f"NonFiniteError {wanted}")
        assert unchanged and states == 0
        assert next_step is None, "the following step is sound"


def with_no_label_anywhere(folder):
    built, step, meshes = build_step(folder, Recipe())
    rows = [(ids, [-100] * len(ids)) for ids, _ in make_rows()]
    before = whole(dict(built.model.named_parameters()))
    result = step(micro_batches_of(rows, 1, meshes.dp_rank, meshes.dp_size), step=1, lr=1e-2)
    after = whole(dict(built.model.named_parameters()))
    return result, all(np.array_equal(before[n], after[n]) for n in before)


def test_a_step_without_a_label_is_skipped_with_the_reason(ranks, folder):
    for result, unchanged in ranks.run(2, with_no_label_anywhere, folder):
        assert unchanged and "label" in result.skipped and result.num_labelled == 0


def more_ranks_than_rows(folder):
    _, step, meshes = build_step(folder, Recipe())
    result = step(micro_batches_of(make_rows(3, empty=-1), 1, meshes.dp_rank, meshes.dp_size), step=1, lr=0.0)
    return result.loss, result.grad_norm, result.num_tokens


def test_ranks_without_a_row_run_fillers(ranks, folder):
    alone = ranks.run(1, more_ranks_than_rows, folder)[0]
    spread = ranks.run(4, more_ranks_than_rows, folder)[0]
    assert spread == pytest.approx(alone, rel=1e-5)
    assert alone[2] == sum(len(ids) for ids, _ in make_rows(3))


def dropout_losses(folder, first):
    _, step, meshes = build_step(folder, Recipe(model={"config_overrides": {"attention_dropout": 0.3}}))
    batches = micro_batches_of(make_rows(), 2, meshes.dp_rank, meshes.dp_size)
    return [step(batches, step=k, lr=0.0).loss for k in range(first, 5)]


def test_dropout_is_a_function_of_the_step(ranks, folder):
    """So a run that resumes at step 3 draws what the unbroken run drew, on every rank, without stored
    state.
    """
    unbroken = ranks.run(2, dropout_losses, folder, 1)[0]
    resumed = ranks.run(2, dropout_losses, folder, 3)[0]
    assert resumed == unbroken[2:]
    assert len(set(unbroken)) == 4


def collectives_in_a_step(folder, accumulation):
    import torch.distributed as dist

    _, step, meshes = build_step(folder, Recipe())
    batches = micro_batches_of(make_rows(), accumulation, meshes.dp_rank, meshes.dp_size)
    step(batches, step=1, lr=0.0)
    reduces, gather = (
        count_calls(dist, "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"),
        step.group.gather,
    )
    numbers: list[int] = []
    step.group.gather = lambda values: numbers.append(len(values)) or gather(values)
    step(batches, step=2, lr=0.0)
    return reduces, numbers


def count_calls(module, *names):
    seen: dict[str, int] = {}

    def counting(name, original):
        def counted(*args, **kwargs):
            seen[name] = seen.get(name, 0) + 1
            return original(*args, **kwargs)

        return counted

    for name in names:
        setattr(module, name, counting(name, getattr(module, name)))
    return seen


def test_gradients_are_reduced_once_and_small_collectives_are_two(ranks, folder):
    (one, few), (four, many) = (ranks.run(2, collectives_in_a_step, folder, n)[0] for n in (1, 4))
    assert sum(one.values()) > 0 and one == four, "micro-batches before the last reduce nothing"
    assert len(few) == len(many) == 2, "one of counts, one of loss and norm; none per micro-batch"
