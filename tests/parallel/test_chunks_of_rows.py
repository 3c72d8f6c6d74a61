"""ChunkMBS: a layer over a few rows at a time is the layer over all of them, in less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from support.models import write_tiny_model
from support.training import Recipe, largest_relative_difference, make_rows, train_rows

from shardyard.config import ParallelConfig
from shardyard.config.layout import Layout
from shardyard.errors import UserError
from shardyard.parallel.chunks import Pieces, apply_chunks

TRAINING = {"adam_epsilon": 1e-4}
CASES = {
    "layers, two rows": (1, {"chunk_mbs": 2}),
    "layers, one row, recomputed": (2, {"recompute": True}),
    "attention only, three rows": (2, {"chunk_mbs": 3, "chunk_mbs_modules": ["model.layers.{*}.self_attn"]}),
    "more rows than there are": (1, {"chunk_mbs": 99}),
}  # fmt: skip
MOE_CASES = {"qwen3_moe": {"chunk_mbs": 3}, "deepseek_v3": {"chunk_mbs": 2, "recompute": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tied"), "qwen3_tied")


@pytest.fixture(scope="module")
def reference(ranks, folder):
    return ranks.run(1, train_rows, folder, make_rows(), Recipe(training=TRAINING, steps=2))[0]


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_rows_give_the_same_training(ranks, folder, reference, name):
    world, parallel = CASES[name]
    recipe = Recipe(
        accumulation=2, training=TRAINING, parallel={"enable_chunk_batch": True, **parallel}, steps=2
    )
    ours = ranks.run(world, train_rows, folder, make_rows(), recipe)[0]
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-5)
    assert largest_relative_difference(ours.first_grads, reference.first_grads) <= 1e-5
    assert largest_relative_difference(ours.weights, reference.weights) <= 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("family", MOE_CASES)
def test_pieces_of_rows_give_the_same_training_of_experts(ranks, model_zoo, family):
    folder = model_zoo.folder(family)
    whole = ranks.run(1, train_rows, folder, make_rows(), Recipe(training=TRAINING, steps=2))[0]
    parallel = {"enable_chunk_batch": True, **MOE_CASES[family]}
    recipe = Recipe(accumulation=2, training=TRAINING, parallel=parallel, steps=2)
    ours = ranks.run(2, train_rows, folder, make_rows(), recipe)[0]
    assert ours.losses == pytest.approx(whole.losses, rel=1e-5)
    assert largest_relative_difference(ours.weights, whole.weights) <= 1e-5


class Layer(nn.Module):
    """Remembers its calls; the answer is a tuple, as that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def forward(self, hidden, scale=None, **kwargs):
        self.calls.append((hidden, scale, kwargs))
        return hidden * 2, None, hidden[0].sum(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(), nn.LayerNorm(3)


class OneRank:
    layout = Layout(world_size=1, pp=1, dp_replicate=1, fsdp=1, cp=1, tp=1, ep=1, ep_fsdp=1)


def _chunked(**fields) -> Layer:
    model = Model()
    names = {"chunk_mbs_modules": ["layer"], "fsdp_modules": ["norm"], "enable_chunk_batch": True}
    apply_chunks(model, ParallelConfig(**(names | fields)), OneRank())
    return model.layer


def test_the_named_arguments_are_cut_at_document_ends():
    layer = _chunked(chunk_mbs=2, chunk_mbs_kwarg_names=["position_ids", "position_embeddings"])
    hidden, ids = torch.arange(30.0).view(1, 10, 3), torch.arange(10)[None]
    pair = (torch.arange(10.0).view(1, 10, 1), torch.arange(20.0).view(1, 10, 2))
    doubled, nothing, sums = layer(
        hidden, 5.0, doc_lens=(4, 1, 3, 2), position_ids=ids, position_embeddings=pair, label=None
    )
    assert torch.equal(doubled, hidden * 2) and nothing is None and torch.equal(sums, hidden[0].sum(-1))
    (first, scale, told), (second, _, told_next) = layer.calls
    assert first.tolist() == hidden[:, :5].tolist() and second.tolist() == hidden[:, 5:].tolist()
    assert scale == 5.0 and told["label"] is None
    assert told["doc_lens"] == (4, 1) and told_next["doc_lens"] == (3, 2)
    assert told["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert told_next["position_embeddings"][1].tolist() == pair[1][:, 5:].tolist()


def test_the_gradient_of_pieces_is_that_of_the_whole():
    layer = _chunked(chunk_mbs=1)
    hidden = torch.randn(1, 6, 3, requires_grad=True)
    weights = torch.randn(1, 6, 3)
    (layer(hidden, doc_lens=(1, 3, 2))[0] * weights).sum().backward()
    assert torch.allclose(hidden.grad, 2 * weights)


def test_without_documents_the_module_runs_whole():
    layer = _chunked()
    layer(torch.zeros(1, 7, 3))
    assert len(layer.calls) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_mbs_kwarg_names": ["position_ids"]}, "chunk_mbs_kwarg_names.*position_embeddings"),
        ({"chunk_mbs_arg_indexs": []}, "chunk_mbs_arg_indexs.*argument 0"),
    ],
)
def test_an_argument_of_tokens_that_is_not_listed_is_named(fields, message):
    layer = _chunked(**fields)
    with pytest.raises(UserError, match=message):
        layer(torch.zeros(1, 5, 3), doc_lens=(2, 3), position_embeddings=(torch.zeros(1, 5, 1),))


@pytest.mark.parametrize(
    ("modules", "message"),
    [(["norm"], "norm does not learn where documents end"), (["nope"], "nope matches nothing")],
)
def test_modules_that_cannot_run_in_pieces_are_refused(modules, message):
    with pytest.raises(UserError, match=message):
        _chunked(chunk_mbs_modules=modules)


def test_a_unit_of_fsdp_inside_a_piece_is_refused(ranks, folder):
    """Ranks have different numbers of rows, so its gathers would not meet."""
    fields = {"enable_chunk_batch": True, "fsdp_modules": ["model.layers.{*}", "model.layers.{*}.mlp"]}
    with pytest.raises(AssertionError, match=r"holds model\.layers\.0\.mlp of parallel\.fsdp_modules"):
        ranks.run(1, train_rows, folder, make_rows(), Recipe(parallel=fields))


def test_a_piece_holds_so_many_rows():
    pieces = Pieces("layer", 3, (), ())
    assert pieces.lengths((5, 4, 3, 2, 1, 6, 7)) == [(5, 4, 3), (2, 1, 6), (7,)]
