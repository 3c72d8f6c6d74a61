"""Logits exist at labelled positions only."""

from __future__ import annotations

import pytest
from support.models import FAMILIES, write_tiny_model
from support.training import Recipe, build_step, make_rows, micro_batches_of


def head_rows(folder):
    """How many positions reach the head in a forward of a micro-batch, and how many of it are labelled."""
    built, step, meshes = build_step(folder, Recipe())
    (batch,) = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
    seen: list[int] = []
    built.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[-2])
    )
    step([batch], step=1, lr=0.0)
    return seen, batch.num_labelled, batch.num_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_sees_labelled_positions_only(ranks, tmp_path, family):
    seen, labelled, tokens = ranks.run(1, head_rows, write_tiny_model(tmp_path / family, family))[0]
    assert seen == [labelled] and labelled < tokens
