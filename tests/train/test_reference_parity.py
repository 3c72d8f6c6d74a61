"""Invariant: 20 steps equal a plain loop over the same transformers model with torch.optim.AdamW."""

from __future__ import annotations

import pytest
from support.models import write_tiny_model
from support.reference_run import make_optimizer, plain_step
from support.training import Recipe, make_rows, train_rows

FAMILIES = ("qwen3", "llama_tied", "qwen3_moe", "deepseek_v3", "glm4_moe")
STEPS, TOLERANCE = 20, 1e-5
RECIPE = Recipe(accumulation=2, steps=STEPS, training={"adam_epsilon": 1e-4, "weight_decay": 0.1})


def plain_loop(folder, rows):
    """Each row on its own, whole logits, the mean over labelled tokens: what a user would write by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.train()
    optimizer = make_optimizer(model)
    losses, norms = zip(*(plain_step(model, optimizer, rows) for _ in range(STEPS)), strict=True)
    return list(losses), list(norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_plain_loop_on_one_and_two_ranks(ranks, tmp_path, family):
    folder, rows = write_tiny_model(tmp_path / family, family), make_rows()
    losses, norms = ranks.run(1, plain_loop, folder, rows, init_process_group=False)[0]
    assert losses[-1] < losses[0] - 0.5
    for world in (1, 2):
        ours = ranks.run(world, train_rows, folder, rows, RECIPE)[0]
        assert ours.losses == pytest.approx(losses, rel=TOLERANCE)
        assert ours.norms == pytest.approx(norms, rel=1e-4)
