"""fp16 compute: steps that overflow are skipped on every rank alike, the rest trains as one process does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.training import Recipe, build_step, make_rows, micro_batches_of, whole_model

FP16 = {"param_dtype": "fp16"}
# Far apart, so that no layout's rounding decides what overflows (2^24 does, 2^19 does not).
SCALES = {"fp16_initial_scale": 2.0**29, "fp16_growth_factor": 32.0, "fp16_backoff_factor": 1 / 32}
TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 0.5, "fp16_growth_interval": 3, **SCALES}
STEPS = 10


def fp16_steps(folder, rows, recipe):
    """Scale before each step, loss, norm, whether it was skipped; the weights after all of them."""
    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(rows, recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    seen = []
    for number in range(1, recipe.steps + 1):
        scale = step.scale
        result = step(batches, step=number, lr=1e-2)
        seen.append((scale, result.loss, result.grad_norm, result.skipped is not None))
    return seen, whole_model(dict(built.model.named_parameters()))


def grad_scaler_steps(folder, rows):
    """The same with transformers' model, torch.optim.AdamW and torch.amp.GradScaler, row by row."""
    import torch
    from transformers import AutoModelForCausalLM

    masters = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, attn_implementation="sdpa")
    pairs = list(zip(masters.parameters(), half.parameters(), strict=True))
    groups = [
        {"params": [m for m, _ in pairs if m.ndim >= 2], "weight_decay": 0.01},
        {"params": [m for m, _ in pairs if m.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**29, growth_factor=32.0, backoff_factor=1 / 32, growth_interval=3
    )
    labelled = sum(label != -100 for _, labels in rows for label in labels)
    seen = []
    for _ in range(STEPS):
        with torch.no_grad():
            for master, copy in pairs:
                copy.copy_(master)
                master.grad = torch.zeros_like(master)
        total = 0.0
        for ids, labels in rows:
            targets = torch.tensor(labels)
            keep = torch.nonzero(targets != -100).squeeze(-1)
            if len(keep) == 0:
                continue
            logits = half(torch.tensor([ids]), use_cache=False, logits_to_keep=keep).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), targets[keep], reduction="sum")
            scaler.scale(loss / labelled).backward()
            total += float(loss)
            for master, copy in pairs:
                assert master.grad is not None and copy.grad is not None
                master.grad += copy.grad.float()
                copy.grad = None
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scale, total / labelled, float(norm), scaler.get_scale() < scale))
    return seen, {name: p.detach().numpy() for name, p in masters.named_parameters()}


@pytest.fixture(scope="module")
def reference(ranks, model_zoo):
    return ranks.run(1, grad_scaler_steps, model_zoo.folder("parity_dense"), make_rows())[0]


def assert_same(ours, theirs, *, loss: float = 2e-3, weights: float = 2e-2):
    (mine, my_weights), (others, their_weights) = ours, theirs
    assert [(s, skipped) for s, _, _, skipped in mine] == [(s, skipped) for s, _, _, skipped in others]
    for (_, a, norm, skipped), (_, b, their_norm, _) in zip(mine, others, strict=True):
        assert a == pytest.approx(b, rel=loss)
        if not skipped:
            assert norm == pytest.approx(their_norm, rel=10 * loss)
    for name, wanted in their_weights.items():
        assert np.abs(my_weights[name] - wanted).max() <= weights * np.abs(wanted).max(), name


def test_one_process_is_grad_scalers_loop(ranks, model_zoo, reference):
    """Skipped and good steps, falls and growths, losses, norms and weights; also row by row."""
    recipe = Recipe(accumulation=16, parallel=FP16, training=TRAINING, steps=STEPS)
    ours = ranks.run(1, fp16_steps, model_zoo.folder("parity_dense"), make_rows(), recipe)[0]
    assert_same(ours, reference)
    scales = [scale for scale, *_ in ours[0]]
    skipped = [skip for *_, skip in ours[0]]
    assert 2 <= sum(skipped) < STEPS - 3 and any(b > a for a, b in pairwise(scales))


LAYOUTS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "TP 2, accumulation, recompute": (2, "dense", 2, {"tp_size": 2, "recompute": "selective"}),
    "FSDP 2, sums in fp16": (2, "dense", 2, {"reduce_dtype": "fp16"}),
    "HSDP 2x2": (4, "dense", 1, {"fsdp_size": 2}),
    "CP 2": (2, "dense", 1, {"cp_size": 2}),
    "PP 2": (2, "dense", 2, {"pp_size": 2}),
    "offloaded parameters": (2, "dense", 1, {"cpu_offload": True}),
    "EP 2": (2, "moe", 1, {"ep_size": 2}),
    "TP 2 with EP 2": (2, "moe", 2, {"tp_size": 2, "ep_size": 2}),
    "PP 2 with EP 2": (4, "moe", 2, {"pp_size": 2, "ep_size": 2}),
}
QUICK = {"TP 2, accumulation, recompute"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in LAYOUTS]
)
def test_layouts_skip_and_train_alike(ranks, model_zoo, reference, name):
    world, family, accumulation, parallel = LAYOUTS[name]
    folder = model_zoo.folder(f"parity_{family}")
    recipe = Recipe(accumulation=accumulation, parallel=FP16 | parallel, training=TRAINING, steps=STEPS)
    alone = Recipe(parallel=FP16, training=TRAINING, steps=STEPS)
    wanted = reference if family == "dense" else ranks.run(1, fp16_steps, folder, make_rows(), alone)[0]
    every = ranks.run(world, fp16_steps, folder, make_rows(), recipe)
    assert all([step[0] for step in seen] == [step[0] for step in every[0][0]] for seen, _ in every)
    # With experts, a token whose choice is nearly even may be sent to another one for a rounding in fp16.
    assert_same(every[0], wanted, weights=2e-2 if family == "dense" else 5e-2)


def balanced(folder, scale):
    """Gradients of the routers, where the loss of balance is all that is trained of them."""
    options = {"router_aux_loss_coef": 10.0, "fp16_initial_scale": scale, "max_grad_norm": 1e9}
    built, step, _ = build_step(folder, Recipe(parallel=FP16, training=options))
    batches = micro_batches_of(make_rows(), 1, 0, 1)
    step.optimizer.step = lambda *_: None
    step.optimizer.zero_grad = lambda **_: None
    result = step(batches, step=1, lr=0.0)
    assert result.skipped is None
    gates = {n: p.grad for n, p in built.model.named_parameters() if n.endswith("mlp.gate.weight")}
    return result.routing.aux_loss, whole_model(gates)


def test_the_loss_of_balance_is_scaled_too(ranks, model_zoo):
    folder = model_zoo.folder("parity_moe")
    (loss, plain), (same_loss, scaled) = (ranks.run(1, balanced, folder, s)[0] for s in (1.0, 256.0))
    assert same_loss == pytest.approx(loss, rel=1e-5)
    for name, wanted in plain.items():
        assert np.abs(scaled[name] - wanted).max() <= 1e-2 * np.abs(wanted).max()


def at_the_minimum(folder, policy, poison):
    training = {"fp16_initial_scale": 2.0**40, "fp16_min_scale": 2.0**40, "on_nonfinite": policy}
    if poison:
        training = {"on_nonfinite": policy}
    built, step, meshes = build_step(folder, Recipe(parallel=FP16, training=training))
    batches = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
    if poison:
        built.model.register_forward_hook(lambda _, args, output: output * float("nan"))
    gathers, gather = [], step.group.gather
    step.group.gather = lambda values: gathers.append(1) or gather(values)
    before = step.scale
    try:
        told = step(batches, step=1, lr=1e-2).skipped
    except Exception as error:
        told = f"{type(error).__name__} {error}"
    return told, step.scale == before, len(step.optimizer.state), len(gathers)


@pytest.mark.parametrize(
    ("policy", "poison", "told"),
    [
        ("stop", False, "NonFiniteError step 1: the loss is finite but the gradient is NaN or Inf"),
        ("skip", False, "step 1: the loss is finite but the gradient is NaN or Inf"),
        ("stop", True, "NonFiniteError step 1: the loss is NaN or Inf"),
    ],
)
def test_what_no_scale_can_mend_is_left_to_on_nonfinite(ranks, model_zoo, policy, poison, told):
    for message, same_scale, moved, gathers in ranks.run(
        2, at_the_minimum, model_zoo.folder("parity_dense"), policy, poison
    ):
        assert message.startswith(told)
        assert same_scale and not moved and gathers == 2


def overflowing(folder):
    _, step, meshes = build_step(folder, Recipe(parallel=FP16, training={"fp16_initial_scale": 2.0**40}))
    batches = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
    collectives, gather = [], step.group.gather
    step.group.gather = lambda values: collectives.append("gather") or gather(values)
    step.group.gather_objects = lambda value: collectives.append("objects")
    result = step(batches, step=1, lr=1e-2)
    return result.skipped, step.scale, len(step.optimizer.state), collectives


def test_an_overflow_costs_no_collective_and_is_told(ranks, model_zoo):
    for told, scale, moved, collectives in ranks.run(2, overflowing, model_zoo.folder("parity_dense")):
        assert told == (
            "gradients overflow fp16 with the loss scaled by 1.09951e+12; the scale is 5.49756e+11 from now "
            "on (1 such step(s) so far)"
        )
        assert scale == 2.0**39 and moved == 0 and collectives == ["gather", "gather"]


def test_a_resumed_run_is_the_unbroken_one(ranks, tmp_path):
    from support.whole_runs import metrics, train, write_numbered, write_workspace

    write_workspace(tmp_path)
    write_numbered(tmp_path / "rows.jsonl", range(4))
    words = [
        "--parallel.param_dtype", "fp16", "--training.fp16_initial_scale", "2097152", "--training.max_steps",
        "6", "--training.fp16_growth_interval", "2", "--training.lr_scheduler_type", "constant",
    ]  # fmt: skip
    train(ranks, tmp_path, "whole", *words)
    train(ranks, tmp_path, "parts", *words, "--training.max_steps", "4", leg="first")
    latest = ["--training.resume_from_checkpoint", "latest"]
    train(ranks, tmp_path, "parts", *words, *latest, leg="second")
    whole, parts = (
        [{k: m[k] for k in ("step", "loss", "grad_norm", "loss_scale")} for m in metrics(tmp_path, out)]
        for out in ("whole", "parts")
    )
    assert [str(m) for m in whole] == [str(m) for m in parts]  # as text: NaN equals itself
    assert len({m["loss_scale"] for m in whole}) > 1
