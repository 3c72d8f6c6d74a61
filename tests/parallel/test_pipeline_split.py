"""Which layers a stage owns, held against an exhaustive search; and models that cannot be cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.config import ParallelConfig
from shardyard.errors import UserError
from shardyard.parallel.pipeline import Costs, Stage, check_hands_on, costs_of, describe_whole, even_split
from shardyard.parallel.pipeline.schedule import filled_count
from shardyard.parallel.pipeline.split import plan_stages


def every_cut(layers: int, stages: int):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        bounds = (0, *ends, layers)
        yield tuple(bounds[s + 1] - bounds[s] for s in range(stages))


def stage_costs(costs: Costs, counts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    compute, held, at = [], [], 0
    for count in counts:
        compute.append(sum(costs.layer_compute[at : at + count]))
        held.append(sum(costs.layer_parameters[at : at + count]))
        at += count
    compute[-1] += costs.head
    held[-1] += costs.head
    held[0] += costs.embedding
    return compute, held


weights = st.integers(1, 9)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.tuples(weights, weights), min_size=2, max_size=8),
    stages=st.integers(1, 5),
    embedding=st.integers(0, 12),
    head=st.integers(0, 12),
)
def test_the_even_split_is_the_best_of_all_cuts(layers, stages, embedding, head):
    """Least compute on the slowest stage; among those cuts, the parameters spread most evenly."""
    stages = min(stages, len(layers))
    costs = Costs(
        tuple(float(c) for c, _ in layers), tuple(float(p) for _, p in layers), float(embedding), float(head)
    )
    chosen = even_split(costs, stages)
    assert len(chosen) == stages and sum(chosen) == len(layers) and min(chosen) >= 1

    def merit(counts: tuple[int, ...]) -> tuple[float, float]:
        compute, held = stage_costs(costs, counts)
        return max(compute), sum(size**2 for size in held)

    assert merit(chosen) == min(map(merit, every_cut(len(layers), stages)))


def test_a_large_output_layer_takes_layers_from_the_last_stage():
    assert even_split(Costs.uniform(28, embedding=10, head=10), 2) == (19, 9)
    assert even_split(Costs.uniform(28), 4) == (7, 7, 7, 7)
    assert even_split(Costs.uniform(5, embedding=2), 2) == (2, 3)


def test_stages_lie_on_ranks_in_turn():
    plan = plan_stages(ParallelConfig(pp_size=2, pp_schedule="interleaved_1f1b"), Costs.uniform(8))
    assert plan.bounds == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [list(plan.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [plan.stage_of_layer(layer) for layer in (0, 3, 7, 8)] == [0, 1, 3, None]


@pytest.mark.parametrize(
    ("settings_", "layers", "words"),
    [
        ({"pp_size": 4}, 3, ("parallel.pp_size: 4", "3", "pp_size=3")),
        (
            {"pp_size": 2, "pp_layers_per_stage": (2, 1)},
            4,
            ("parallel.pp_layers_per_stage: [2, 1]", "[2, 2]"),
        ),
        (
            {"pp_size": 2, "pp_layers_per_stage": (4, 0)},
            4,
            ("parallel.pp_layers_per_stage: [4, 0]", "[2, 2]"),
        ),
        ({"pp_size": 2, "pp_stages_per_rank": 2}, 4, ("parallel.pp_stages_per_rank: 2", "interleaved_1f1b")),
    ],
)
def test_stages_that_do_not_fit_are_refused(settings_, layers, words):
    with pytest.raises(UserError) as refused:
        plan_stages(ParallelConfig(**settings_), Costs.uniform(layers))
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("count", "pp_size", "filled"), [(1, 4, 1), (3, 4, 3), (5, 2, 6), (7, 2, 8), (9, 4, 10), (10, 4, 10)]
)
def test_interleaved_micro_batches_are_filled_to_whole_rounds(count, pp_size, filled):
    """By hand: 9 on 4 ranks would be 2 rounds of unequal size, 10 are 2 of 5; fewer than 4 are one round."""
    parallel = ParallelConfig(pp_size=pp_size, pp_schedule="interleaved_1f1b")
    assert filled_count(count, pp_size, parallel) == filled
    assert filled_count(count, pp_size, ParallelConfig(pp_size=pp_size)) == count


def on_meta(family: str, **overrides):
    import transformers
    from support.models import tiny_config

    config = tiny_config(family)
    for key, value in overrides.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_costs_count_the_experts_that_a_token_meets():
    """By hand from the sizes: 4 experts of which 2 are chosen; the first layer of DeepSeek is dense."""
    costs = costs_of(on_meta("qwen3_moe"))
    expert = 3 * 24 * 32
    assert [held - met for held, met in zip(costs.layer_parameters, costs.layer_compute, strict=True)] == [
        2 * expert,
        2 * expert,
    ]
    assert costs.embedding == costs.head == 199 * 32
    deepseek = costs_of(on_meta("deepseek_v3"))
    assert deepseek.layer_parameters[0] == deepseek.layer_compute[0]
    assert deepseek.layer_parameters[1] - deepseek.layer_compute[1] == 2 * expert


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_families_whose_body_only_runs_its_layers_can_be_cut(family):
    check_hands_on(on_meta(family))


def test_a_family_that_scales_its_embeddings_outside_them_is_refused():
    import transformers

    config = transformers.GraniteConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, embedding_multiplier=12.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"parallel\.pp_size: granite models.*changes the hidden"):
        check_hands_on(model)


def test_a_family_with_other_parts_is_refused():
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50)
        )
    with pytest.raises(UserError, match=r"parallel\.pp_size: gpt2 models have no transformer\.embed_tokens"):
        check_hands_on(model)


def test_a_stage_tells_the_loader_whose_a_tensor_is():
    model = on_meta("qwen3_tied")
    plan = plan_stages(ParallelConfig(pp_size=2), costs_of(model))
    stage = Stage(0, plan, describe_whole(model))
    keys = {
        "model.embed_tokens.weight": 0,
        "model.layers.0.mlp.up_proj.weight": 0,
        "model.layers.1.input_layernorm.weight": 1,
        "model.norm.weight": 1,
        "lm_head.weight": 1,
        "model.layers.2.mlp.up_proj.weight": None,
        "visual.weight": None,
    }
    assert {key: stage.find_rank_for_key(key, 2, "model") for key in keys} == keys
    assert stage.whole.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert stage.whole.num_parameters == sum(p.numel() for p in model.parameters())
