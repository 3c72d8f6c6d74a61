"""The loss of a validation set: token-weighted, the same for any split, and training goes on untouched."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, samples_of, whole
from support.validation import eval_rows, evaluator_of, real_trainer

from shardyard.errors import UserError
from shardyard.monitor import EvalResult, EvalScore

SEVEN, THREE = eval_rows(7), eval_rows(3, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def plain_loop(folder, rows) -> tuple[float, int]:
    """(loss sum, labelled tokens) with transformers alone: a row at a time, every logit, sums in fp64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            picked = [-log_probs[t, label].item() for t, label in enumerate(labels) if label != -100]
            total, count = total + sum(picked), count + len(picked)
    return total, count


def scores_by_batch(folder, batches: tuple[int, ...], recipe: Recipe) -> list[EvalResult]:
    built, step, meshes = build_step(folder, recipe)
    sets = {"seven": samples_of(SEVEN), "three": samples_of(THREE)}
    return [evaluator_of(built, step, meshes, sets, size, recipe.packed).evaluate() for size in batches]


def check_scores(results: list[EvalResult], wanted: dict[str, tuple[float, int]]) -> None:
    for result in results:
        assert list(result.sets) == ["seven", "three"]
        for name, (loss_sum, labelled) in wanted.items():
            score = result.sets.get(name, result.total)
            assert score.labelled == labelled
            assert score.loss == pytest.approx(loss_sum / labelled, rel=1e-6)
            assert score.perplexity == pytest.approx(math.exp(loss_sum / labelled), rel=1e-5)
        assert result.sets["seven"].tokens == sum(len(ids) for ids, _ in SEVEN)
        assert result.total.tokens == sum(len(ids) for ids, _ in SEVEN + THREE)


def wanted_of(folder) -> dict[str, tuple[float, int]]:
    seven, three = plain_loop(folder, SEVEN), plain_loop(folder, THREE)
    return {"seven": seven, "three": three, "both": (seven[0] + three[0], seven[1] + three[1])}


@pytest.fixture(scope="module")
def wanted(folder):
    return wanted_of(folder)


@pytest.mark.parametrize(
    ("world", "batches"),
    [(1, (5,)), (2, (1,)), (3, (2,))]
    + [pytest.param(world, (1, 2, 5), marks=pytest.mark.soak) for world in (1, 2, 3, 4)],
)
def test_the_loss_is_that_of_a_plain_loop_for_any_batch_and_number_of_ranks(
    ranks, folder, wanted, world, batches
):
    results = ranks.run(world, scores_by_batch, folder, batches, Recipe())
    for of_rank in results:
        check_scores(of_rank, wanted)
        assert [score.total.loss for score in of_rank] == [score.total.loss for score in results[0]]


def test_a_mean_of_rows_would_be_another_number(folder, wanted):
    """So the tests here tell it from the right one."""
    sums = [plain_loop(folder, [row]) for row in SEVEN]
    mean = float(np.mean([total / count for total, count in sums if count]))
    assert mean != pytest.approx(wanted["seven"][0] / wanted["seven"][1], rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(
    "parallel",
    [
        {"recompute": "full"},
        {"cpu_offload": True},
        {"reshard_after_forward": False},
        {"fsdp_size": 1},
        {"ignored_modules": ["model.norm"]},
    ],
    ids=str,
)
def test_every_layout_scores_the_same(ranks, model_zoo, family, parallel):
    folder = model_zoo.folder(family)
    for result in ranks.run(2, scores_by_batch, folder, (2,), Recipe(parallel=parallel)):
        check_scores(result, wanted_of(folder))


class StubGroup:
    """Gives what this rank says together with what others would have said."""

    rank = 0

    def __init__(self, *others: list[float]) -> None:
        self.others = list(others)
        self.calls = 0

    def gather(self, numbers):
        import torch

        self.calls += 1
        return torch.tensor(
            [list(numbers), *[row[: len(numbers)] for row in self.others]], dtype=torch.float64
        )


def stub_evaluator(losses_by_row: dict[int, float], sets: dict[str, Any], per_device: int, group: Any = None):
    """An evaluator whose model gives ``losses_by_row[first id of each row]``, summed."""
    import torch

    from shardyard.data.eval_sets import EvalSet
    from shardyard.device import Device
    from shardyard.evaluate.evaluator import Evaluator

    class Stub(torch.nn.Module):
        def forward(self, input_ids, labels, position_ids, doc_lens, is_filler):
            firsts = input_ids[0, position_ids[0] == 0].tolist()
            return torch.tensor(sum(losses_by_row[first] for first in firsts), dtype=torch.float32)

    eval_sets = [EvalSet(name, samples_of(rows)) for name, rows in sets.items()]
    group = group or StubGroup()
    alone: Any = SimpleNamespace(dp_rank=0, dp_size=1, leads_batch=True, counts_loss=True)
    return Evaluator(
        Stub(), group, Device("cpu"), eval_sets,
        meshes=alone, per_device=per_device, packed=True,
    )  # fmt: skip


@pytest.mark.parametrize("per_device", [1, 2])
def test_batches_weigh_by_their_labelled_tokens(per_device):
    """PITFALLS 76: losses 3 over 1 token and 40 over 4 are 43 / 5 = 8.6, not (3 + 10) / 2 = 6.5."""
    rows = [([10, 5], [5, -100]), ([11, 5, 6, 7, 8], [5, 6, 7, 8, -100])]
    group = StubGroup()
    evaluator = stub_evaluator({10: 3.0, 11: 40.0}, {"set": rows}, per_device, group)
    result = evaluator.evaluate()
    assert result.sets["set"].loss == result.total.loss == 8.6
    assert result.total.perplexity == math.exp(8.6)
    assert group.calls == 2, "one exchange of counts when it is built, one of sums in a validation"


def test_sets_weigh_by_their_labelled_tokens_too():
    result = EvalResult({"a": EvalScore(3.0, 1, 2, 0.1), "b": EvalScore(40.0, 4, 5, 0.2)})
    total = result.total
    assert (total.loss_sum, total.labelled, total.tokens, total.loss) == (43.0, 5, 7, 8.6)
    assert total.seconds == pytest.approx(0.3)


def test_a_nan_and_an_overflow_are_shown_as_what_they_are():
    rows = [([10, 5], [5, -100]), ([11, 5], [5, -100])]
    score = stub_evaluator({10: 1.0, 11: math.nan}, {"set": rows}, 1).evaluate().total
    assert math.isnan(score.loss) and math.isnan(score.perplexity)
    assert stub_evaluator({10: 1e4, 11: 1e4}, {"set": rows}, 1).evaluate().total.perplexity == math.inf


def test_what_cannot_be_scored_is_refused_with_the_set_named():
    labelled, bare = ([3, 4], [4, -100]), ([3, 4], [-100, -100])
    with pytest.raises(UserError, match=r"validation set 'wiki' has 2 row\(s\) and no token with a label"):
        stub_evaluator({}, {"c4": [labelled], "wiki": [bare, bare]}, 1)
    with pytest.raises(UserError, match=r"validation set 'wiki' has 0 row\(s\)"):
        stub_evaluator({}, {"wiki": []}, 1)
    with pytest.raises(UserError, match="'all' is the name of the total"):
        stub_evaluator({}, {"all": [labelled], "wiki": [labelled]}, 1)
    # Labels that only other ranks hold are labels.
    stub_evaluator({}, {"wiki": [bare]}, 1, StubGroup([7, 9]))


def documents_of(rows) -> list[Any]:
    """Pairs of rows as samples of two documents."""
    from shardyard.data.types import Sample

    singles = samples_of(rows)
    pairs = [singles[i : i + 2] for i in range(0, len(singles), 2)]
    return [
        Sample(
            np.concatenate([s.input_ids for s in pair]),
            np.concatenate([s.labels for s in pair]),
            tuple(len(s.input_ids) for s in pair),
        )
        for pair in pairs
    ]


def score_documents(folder, packed) -> list[Any]:
    """Seven documents in four samples on the ranks: with a forward each, and in packs."""
    built, step, meshes = build_step(folder, Recipe())
    calls = []
    built.model.register_forward_hook(lambda *_: calls.append(None))
    evaluator = evaluator_of(built, step, meshes, {"set": documents_of(SEVEN)[::-1]}, 2, packed)
    gathers = []
    gather = step.group.gather
    step.group.gather = lambda numbers: gathers.append(len(numbers)) or gather(numbers)
    return [evaluator.evaluate().total, len(calls), gathers]


def test_a_forward_for_each_document_gives_the_same_loss_on_ranks_with_unequally_many(ranks, folder, wanted):
    """Samples hold 1, 2, 2 and 2 documents; rank 0 has the first and third: 3 of them, so one filler."""
    loss_sum, labelled = wanted["seven"]
    for packed, forwards in ((False, 4), (True, 1)):
        for score, calls, gathers in ranks.run(2, score_documents, folder, packed):
            assert score.labelled == labelled and score.loss == pytest.approx(loss_sum / labelled, rel=1e-6)
            assert calls == forwards and gathers == [1], "agreed ahead, not in the validation"


def state_around_a_validation(folder, parallel) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor

    built, step, meshes = build_step(folder, Recipe(parallel=parallel))
    batches = micro_batches_of(make_rows(), 2, meshes.dp_rank, meshes.dp_size)
    step(batches, step=1, lr=1e-2)
    evaluator = evaluator_of(built, step, meshes, {"seven": samples_of(SEVEN)}, 2)
    modes: list[tuple[bool, bool]] = []

    def draw(module, args, kwargs) -> None:
        modes.append((module.training, torch.is_grad_enabled()))
        random.random()
        np.random.rand()
        torch.rand(3)

    handle = built.model.register_forward_pre_hook(draw, with_kwargs=True)
    built.model.model.norm.eval()  # a module with a mode of its own keeps it
    before = snapshot(built.model, step.optimizer)
    evaluator.evaluate()
    handle.remove()
    after = snapshot(built.model, step.optimizer)
    parameters = list(built.model.parameters())
    return {
        "modes": modes,
        "equal": {what: same(before[what], after[what]) for what in before},
        "sharded": all(isinstance(p, DTensor) for p in parameters),
        "gradients": sum(p.grad is not None for p in parameters),
        "training": (built.model.training, built.model.model.norm.training, built.model.model.training),
    }


def snapshot(model, optimizer) -> dict[str, Any]:
    import torch

    from shardyard.checkpoint.state import model_tensors, optimizer_tensors

    return {
        "weights": {name: value.copy() for name, value in whole(model_tensors(model)).items()},
        "optimizer": {name: v.copy() for name, v in whole(optimizer_tensors(model, optimizer)).items()},
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True)[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
    }


def same(before, after) -> bool:
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)
    return before == after


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        pytest.param({"reshard_after_forward": False}, marks=pytest.mark.soak),
        pytest.param({"cpu_offload": True, "recompute": "full"}, marks=pytest.mark.soak),
        pytest.param({"fsdp_size": 1}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_validation_leaves_everything_that_training_goes_on_with(ranks, folder, parallel):
    for found in ranks.run(2, state_around_a_validation, folder, parallel):
        assert found["modes"] == [(False, False)] * 2, (
            "7 rows on 2 ranks in batches of 2: no dropout, no graph"
        )
        assert all(found["equal"].values()) and len(found["equal"]) == 5, found["equal"]
        assert found["sharded"] and found["gradients"] == 0
        assert found["training"] == (True, False, True)


TRAINING = {
    "lr": 1e-2, "max_steps": 6, "save_steps": 0, "save_epochs": 0, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2,
}  # fmt: skip
DROPOUT = {"config_overrides": {"attention_dropout": 0.3}}


def losses_with_and_without(folder, out, parallel) -> list[Any]:
    """Two runs of six updates in turn, without and with a validation every second update."""
    outcomes = []
    for name, sets in (("without", None), ("with", {"seven": samples_of(SEVEN)})):
        training = TRAINING | {"eval_steps": 2, "eval_on_start": True}
        trainer = real_trainer(
            folder, out / name, Recipe(training=training, parallel=parallel, model=DROPOUT), make_rows(16),
            sets=sets,
        )  # fmt: skip
        seen: list[tuple[float, float]] = []
        trainer.observe = lambda record, seen=seen: (
            seen.append((record.loss, record.grad_norm)) if record else None
        )
        trainer.train()
        trainer.monitor.close()
        outcomes.append((seen, whole(dict(trainer.step.model.named_parameters()))))
    return outcomes


@pytest.mark.parametrize(
    "parallel",
    [{"recompute": "full"}]
    + [
        pytest.param(parallel, marks=pytest.mark.soak)
        for parallel in ({}, {"cpu_offload": True}, {"reshard_after_forward": False}, {"fsdp_size": 1})
    ],
    ids=str,
)
def test_training_with_dropout_goes_on_bit_for_bit_as_without_validation(
    ranks, folder, wanted, tmp_path, parallel
):
    from shardyard.monitor import read_metrics, read_validations

    for (plain, weights), (validated, after) in ranks.run(
        2, losses_with_and_without, folder, tmp_path, parallel
    ):
        assert len(plain) == 6 and len(set(plain)) == 6
        assert validated == plain, "losses and gradient norms, bit for bit"
        assert all(np.array_equal(weights[name], after[name]) for name in weights)
    metrics = tmp_path / "with" / "metrics.jsonl"
    evals = read_validations(metrics)
    assert [values["step"] for values in evals] == [0, 2, 4, 6]
    # At the start the model is the one on disk; attention_dropout 0.3 must not act.
    loss_sum, labelled = wanted["seven"]
    assert evals[0]["eval"]["seven"]["loss"] == pytest.approx(loss_sum / labelled, rel=1e-6)
    assert [values["step"] for values in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6]
