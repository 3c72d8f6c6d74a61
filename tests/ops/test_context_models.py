"""Whole models over the ranks of a sequence: logits and gradients of one process, exchanges counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.attention import relative_error
from support.models import tiny_config

from shardyard.ops import DOCUMENTS_ATTENTION, documents_attention
from shardyard.parallel.sequence import SequenceLayout

DOC_LENS = (13, 1, 22, 5)


def config_of(family: str) -> Any:
    if family != "gpt_oss":
        return tiny_config(family)
    return transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=131072,
    )  # fmt: skip


def model_of(family: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(family), attn_implementation=DOCUMENTS_ATTENTION
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    return model.train()


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, and a weight for every token's logits; some tokens have none, as without a label."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 97, (1, sum(DOC_LENS)), generator=generator)
    weights = torch.rand(1, sum(DOC_LENS), generator=generator)
    weights[:, : DOC_LENS[0] + 4] = 0  # so that some ranks have tokens without a label only
    return ids, torch.cat([torch.arange(length) for length in DOC_LENS])[None], weights


def losses(family: str, method: str, recompute: bool) -> dict[str, float]:
    """Errors of this rank's logits and of the summed gradients against one process."""
    model = model_of(family)
    ids, positions, weights = data()
    whole = model(input_ids=ids, position_ids=positions, use_cache=False, doc_lens=DOC_LENS).logits
    (whole.square().sum(-1) * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = SequenceLayout(dist.get_world_size(), dist.get_rank(), method, 1, dist.group.WORLD)
    share = layout.share(DOC_LENS)
    logits = model(
        input_ids=share.cut(ids, 0), position_ids=share.cut_positions(positions), use_cache=False,
        **share.attention_kwargs(),
    ).logits  # fmt: skip
    weights = torch.where(share.real, share.cut(weights, 0), 0)
    (logits.square().sum(-1) * weights).sum().backward()
    parts = [torch.empty_like(logits) for _ in range(layout.cp_size)]
    dist.all_gather(parts, logits.detach())
    errors = {"logits": relative_error(share.restore(torch.stack(parts)), whole.detach().double())}
    for name, parameter in model.named_parameters():
        if name in expected:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(gradient)
            errors[name] = relative_error(gradient, expected[name].double())
    return errors


@pytest.mark.parametrize(
    ("cp", "family", "method", "recompute"),
    [
        (2, "qwen3", "ulysses", True),
        (4, "qwen3", "ring", True),
        (2, "qwen3", "kvallgather", True),
        (4, "deepseek_v3", "ulysses", False),
        (2, "deepseek_v3", "ring", False),
        (2, "deepseek_v3", "kvallgather", False),
        (2, "gpt_oss", "ulysses", False),
        (4, "gpt_oss", "kvallgather", False),
    ],
)
def test_a_model_over_a_shared_sequence_is_that_of_one_process(ranks, cp, family, method, recompute):
    for errors in ranks.run(cp, losses, family, method, recompute):
        assert len(errors) > 10
        assert not {name: error for name, error in errors.items() if not error <= 3e-5}


def exchanges(method: str) -> tuple[Counter[str], Counter[str]]:
    """What one attention calls for, forward and backward: the name of each call, and the numbers it sends."""
    counted: Counter[str] = Counter()

    def counting(name: str, call: Any, sends: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            counted[f"{name}, numbers"] += sends(*args)
            return call(*args, **kwargs)

        return wrapped

    for name, sends in {
        "all_to_all_single": lambda received, sent: sent.numel(),
        "all_gather_single": lambda received, sent: sent.numel(),
        "reduce_scatter_single": lambda received, sent: sent.numel(),
        "batch_isend_irecv": lambda operations: operations[0].tensor.numel(),
    }.items():
        setattr(dist, name, counting(name, getattr(dist, name), sends))
    layout = SequenceLayout(dist.get_world_size(), dist.get_rank(), method, 1, dist.group.WORLD)
    share = layout.share((64,))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, share.local_tokens, 8, generator=draw).requires_grad_() for heads in (8, 2, 2)
    )
    out, _ = documents_attention(torch.nn.Module(), q, k, v, None, **share.attention_kwargs())
    forward = counted.copy()
    out.sum().backward()
    return forward, counted - forward


def exchanges_of_all() -> dict[str, Any]:
    return {method: exchanges(method) for method in ("ulysses", "ring", "kvallgather")}


@pytest.mark.parametrize("cp", [2, 4])
def test_exchanges_are_those_of_the_textbook(ranks, cp):
    """8 heads and 2 key heads of width 8, 64 / cp tokens a rank."""
    tokens = 64 // cp
    heads = 8 * 8 * tokens
    keys_and_values = 2 * 2 * 8 * tokens
    copied = 2 * max(2, cp) * 8 * tokens
    moved = {"all_to_all_single": 2, "all_to_all_single, numbers": heads + copied + heads}
    around = {"batch_isend_irecv": cp - 1, "batch_isend_irecv, numbers": (cp - 1) * keys_and_values}
    back = {"batch_isend_irecv": 2 * cp - 1, "batch_isend_irecv, numbers": (2 * cp - 1) * keys_and_values}
    gathered = {"all_gather_single": 1, "all_gather_single, numbers": keys_and_values}
    scattered = {"reduce_scatter_single": 1, "reduce_scatter_single, numbers": cp * keys_and_values}
    counted = ranks.run(cp, exchanges_of_all)
    for method, wanted in {
        "ulysses": (moved, moved),
        "ring": (around, back),
        "kvallgather": (gathered, gathered | scattered),
    }.items():
        assert [found[method] for found in counted] == [wanted] * cp, method
