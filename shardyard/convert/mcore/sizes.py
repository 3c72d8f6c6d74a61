"""The shape that config.json gives each tensor of a Hugging Face model.

The rules of conversion look at the dimension that they cut; a config.json of another size would pass them
where the other dimension, or the number of experts in joined tensors, is the wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shardyard.convert.mcore.families import Model
from shardyard.convert.weights import Facts
from shardyard.errors import UserError

Shape = tuple[int, ...]


def check_shapes(model: Model, facts: Mapping[str, Facts], folder: Path) -> None:
    """Compare all shapes with config.json's.

    Raises:
        UserError: the first that differs.
    """
    wanted = _shapes(model)
    for name, (shape, _) in facts.items():
        expected = wanted.get(_kind(name))
        if expected is not None and shape != expected:
            raise UserError(
                f"{folder}: {name} is {list(shape)}, but config.json asks for {list(expected)}; is it the "
                "config.json of another size, or is the folder cut in another way than was said?"
            )


def _kind(name: str) -> str:
    """A name without the numbers of layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".{}", name.removeprefix("model."))


def _shapes(model: Model) -> dict[str, Shape]:
    hidden, vocabulary = model.hidden, model.vocabulary
    inner = {
        "embed_tokens.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    layer: dict[str, Shape] = {
        **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,)),
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,)),
        **dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), (vocabulary, hidden)),
        "eh_proj.weight": (hidden, 2 * hidden),
        **(_latent(model) if model.family.latent else _attention(model)),
        **_mlps(model),
    }
    return {**inner, **{f"layers.{{}}.{name}": shape for name, shape in layer.items()}}


def _attention(model: Model) -> dict[str, Shape]:
    rows = {"q": model.heads * model.head_dim, "k": model.groups * model.head_dim}
    rows["v"] = rows["k"]
    return {
        **{f"self_attn.{part}_proj.weight": (count, model.hidden) for part, count in rows.items()},
        **{f"self_attn.{part}_proj.bias": (count,) for part, count in rows.items()},
        **{f"self_attn.{part}_norm.weight": (model.head_dim,) for part in "qk"},
        "self_attn.o_proj.weight": (model.hidden, rows["q"]),
        "self_attn.o_proj.bias": (model.hidden,),
    }


def _latent(model: Model) -> dict[str, Shape]:
    rank, rope = model.latent("kv_lora_rank"), model.latent("qk_rope_head_dim")
    nope, value = model.latent("qk_nope_head_dim"), model.latent("v_head_dim")
    query = model.query_rank or 0
    return {
        "self_attn.q_proj.weight": (model.query_width, model.hidden),
        "self_attn.q_a_proj.weight": (query, model.hidden),
        "self_attn.q_a_layernorm.weight": (query,),
        "self_attn.q_b_proj.weight": (model.query_width, query),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, model.hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (model.heads * (nope + value), rank),
        "self_attn.o_proj.weight": (model.hidden, model.heads * value),
    }


def _mlps(model: Model) -> dict[str, Shape]:
    """Dense, routed and shared; widths that config.json does not state are not checked."""
    dense = model.config.get("intermediate_size")
    found = _gated(tuple(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")), dense, model.hidden)
    experts = model.family.experts
    if not model.experts or experts is None:
        return found
    width = model.config.get("moe_intermediate_size") or dense
    found |= _gated(tuple(part.format(expert="{}") for part in experts.parts), width, model.hidden)
    found[experts.router] = (model.experts, model.hidden)
    if experts.router_bias:
        found[experts.router_bias] = (model.experts,)
    shared = model.config.get(experts.shared_key) if experts.shared_key else None
    if isinstance(width, int) and isinstance(shared, int):
        found |= _gated(experts.shared_parts, width * shared, model.hidden)
    return found


def _gated(names: tuple[str, ...], width: object, hidden: int) -> dict[str, Shape]:
    if not isinstance(width, int):
        return {}
    gate, up, down = names
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
