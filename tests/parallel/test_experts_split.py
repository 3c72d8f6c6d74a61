"""Which modules expert parallelism splits, and what it refuses by name."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import tiny_config
from support.ranks import RankPool

from shardyard.config import ParallelConfig
from shardyard.errors import UserError
from shardyard.parallel.experts.select import expert_modules, fused_experts, routers
from shardyard.parallel.experts.split import apply_expert_parallel


def meta_model(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def mixtral() -> Any:
    from transformers import MixtralConfig

    return meta_model(
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def granite() -> Any:
    from transformers import GraniteMoeConfig

    return meta_model(
        GraniteMoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def meshes(ep: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(ep=ep, pp=1), ep=None)


def test_experts_and_their_routers_are_found_by_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    default = ParallelConfig().ep_modules
    for family, layers in (("qwen3_moe", (0, 1)), ("deepseek_v3", (1, 2)), ("gpt_oss", (0, 1))):
        model = meta_model(tiny_config(family))
        names = [f"model.layers.{layer}.mlp" for layer in layers]
        assert [name for name, _ in expert_modules(model, default)] == [f"{n}.experts" for n in names]
        child = "router" if family == "gpt_oss" else "gate"
        found = routers(model)
        assert [router.name for router in found] == [f"{name}.{child}" for name in names]
        assert [router.experts for router in found] == [4, 4]
        assert [router.bias is not None for router in found] == [family == "deepseek_v3"] * 2
    caplog.clear()
    with caplog.at_level(logging.INFO, "shardyard.parallel"):
        found = expert_modules(model := granite(), default)
        expert_modules(meta_model(tiny_config("qwen3_moe")), default)
    assert [name for name, _ in found] == [f"model.layers.{i}.block_sparse_moe.experts" for i in (0, 1)]
    lines = [record.getMessage() for record in caplog.records if record.name == "shardyard.parallel"]
    assert lines == ["parallel.ep_modules: 2 modules of class GraniteMoeExperts"]
    assert [router.name for router in routers(model)] == [
        f"model.layers.{i}.block_sparse_moe.router" for i in (0, 1)
    ]
    assert len(expert_modules(mixtral(), default)) == len(routers(mixtral())) == 2


def test_dense_models_have_neither() -> None:
    model = meta_model(tiny_config("qwen3"))
    assert (
        expert_modules(model, ParallelConfig().ep_modules)
        == list(fused_experts(model))
        == routers(model)
        == []
    )


@pytest.mark.parametrize(
    ("family", "parallel", "told"),
    [
        ("qwen3", {"ep_size": 2}, ["parallel.ep_size: 2", "no experts"]),
        ("qwen3_moe", {"ep_size": 3}, ["parallel.ep_size: 3", "4 experts", "sizes that do: 1, 2, 4"]),
        ("qwen3_moe", {"ep_size": 2, "ep_modules": ("model.layers.{*}.moe",)}, ["parallel.ep_modules"]),
        ("qwen3_moe", {"ep_size": 2, "ep_modules": ("model.layers.{*}.mlp.gate",)},
         ["parallel.ep_modules", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts"]),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(family: str, parallel: dict[str, Any], told: list[str]) -> None:
    settings = ParallelConfig(**parallel)
    with pytest.raises(UserError) as raised:
        apply_expert_parallel(meta_model(tiny_config(family)), settings, meshes(settings.ep_size))
    assert all(piece in str(raised.value) for piece in told)


def test_experts_with_modules_of_their_own_are_refused() -> None:
    from torch import nn

    model = meta_model(tiny_config("qwen3_moe"))
    model.model.layers[0].mlp.experts.norm = nn.LayerNorm(4, device="meta")
    with pytest.raises(
        UserError, match=r"model\.layers\.0\.mlp\.experts \(Qwen3MoeExperts\) cannot run apart"
    ):
        apply_expert_parallel(model, ParallelConfig(ep_size=2), meshes(2))


def split_on_meta() -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard

    from shardyard.config.layout import resolve_layout
    from shardyard.parallel import build_meshes

    model = meta_model(tiny_config("gpt_oss"))
    settings = ParallelConfig(ep_size=2, ep_dispatcher="mc2")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shardyard.parallel")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    apply_expert_parallel(model, settings, build_meshes(resolve_layout(settings, 2), "cpu"))
    experts = model.model.layers[0].mlp.experts
    shapes = {}
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        shapes[name] = tuple(parameter.to_local().shape)
    again = [name for name, _ in expert_modules(model, settings.ep_modules)]
    return [lines, experts.num_experts, shapes, again, [router.experts for router in routers(model)]]


def test_each_rank_holds_its_share_and_the_model_is_still_known(ranks: RankPool) -> None:
    for lines, held, shapes, again, experts in ranks.run(2, split_on_meta):
        assert len(lines) == 1 and "mc2" in lines[0] and "eager" in lines[0]
        assert held == 2 and experts == [4, 4] and len(again) == 2
        assert shapes == {
            "gate_up_proj": (2, 32, 48), "gate_up_proj_bias": (2, 48),
            "down_proj": (2, 24, 32), "down_proj_bias": (2, 32),
        }  # fmt: skip
