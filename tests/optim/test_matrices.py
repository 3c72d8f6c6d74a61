"""Which parameters are hidden matrices, in real families; and which part of a matrix a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import tiny_config

from shardyard.optim.matrices import Matrix, hidden_matrices
from shardyard.optim.matrix_plan import piece_of


def built(family):
    import torch
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(tiny_config(family))


@pytest.mark.parametrize("family", ["qwen3", "llama_tied", "deepseek_v3", "gpt_oss"])
def test_embeddings_heads_vectors_and_biases_are_no_hidden_matrices(family):
    model = built(family)
    found = hidden_matrices(model)
    hidden = {name for name, parameter in model.named_parameters() if parameter in found}
    left = {name for name, _ in model.named_parameters()} - hidden
    assert all(name.endswith((".weight", "_proj")) and "norm" not in name for name in hidden)
    assert "model.embed_tokens.weight" in left
    assert all("embed" in n or "lm_head" in n or "norm" in n or "bias" in n or "sinks" in n for n in left)


def test_a_norm_with_weights_for_each_head_is_no_hidden_matrix():
    import torch
    import transformers

    config = transformers.CohereConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        use_qk_norm=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert parameters[norm].shape == (2, 8)
    found = hidden_matrices(model)
    assert parameters[norm] not in found
    assert len(found) == 4 + 3, "attention's and the MLP's"


def test_experts_are_as_many_matrices_as_files_hold():
    """Four experts with gate, up and down each, in two layers of the qwen3_moe model."""
    model = built("qwen3_moe")
    shapes = [m.shape for p, held in hidden_matrices(model).items() if p.ndim == 3 for m in held]
    assert sorted(set(shapes)) == [(24, 32), (32, 24)]
    assert (shapes.count((24, 32)), shapes.count((32, 24))) == (2 * 4 * 2, 2 * 4)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_pieces_of_all_ranks_make_the_matrix(step):
    """Against NumPy: a matrix of every ``step``-th column of a tensor that 3 x 2 ranks cut into boxes."""
    tensor = np.arange(7 * 11).reshape(7, 11)
    matrix = Matrix(range(1, 6), range(step - 1, 11, step))
    wanted = tensor[1:6, step - 1 :: step]
    got = np.full_like(wanted, -1)
    for rows in ((0, 3), (3, 6), (6, 7)):
        for cols in ((0, 6), (6, 11)):
            piece = piece_of(0, (0, matrix), (rows, cols))
            held = tensor[slice(*rows), slice(*cols)]
            if piece is None:
                assert not set(held.flat) & set(wanted.flat)
                continue
            for part in (piece.part(0, 2), piece.part(1, 2)):
                assert held[part.local].shape == part.shape
                got[part.whole] = held[part.local]
    assert (got == wanted).all()
