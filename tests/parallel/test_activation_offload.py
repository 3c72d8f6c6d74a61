"""Activations that wait on the host change no bit; what stays on the device does not grow with the layers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.configs import load
from support.models import write_tiny_model
from support.training import Recipe, bits_of, make_rows, train_rows

from shardyard.parallel import offload

OFFLOAD = {"activation_offload": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (1, "moe", {}),
    "full recompute": (1, "moe", {"recompute": "full"}),
    "selective recompute": (1, "dense", {"recompute": "selective"}),
    "pieces": (1, "dense", {"enable_chunk_batch": True, "chunk_mbs": 2}),
    "FSDP 2": (2, "dense", {}),
    "FSDP 2, bf16": (2, "dense", {"param_dtype": "bf16"}),
    "parameters offloaded too": (2, "dense", {"cpu_offload": True}),
    "TP 2": (2, "dense", {"tp_size": 2}),
    "EP 2": (2, "moe", {"ep_size": 2}),
    "TP 2 with EP 2, recompute": (2, "moe", {"tp_size": 2, "ep_size": 2, "recompute": "selective"}),
    "CP ring 2": (2, "dense", {"cp_size": 2, "cp_type": "ring"}),
    "PP 2": (2, "dense", {"pp_size": 2}),
    "PP 2 interleaved, EP 2": (4, "moe", {"pp_size": 2, "pp_schedule": "interleaved_1f1b", "ep_size": 2}),
}
QUICK = {"plain", "PP 2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CASES]
)
def test_no_bit_changes(ranks, model_zoo, name):
    world, family, parallel = CASES[name]
    plain, ours = (
        ranks.run(
            world, train_rows, model_zoo.folder(f"parity_{family}"), make_rows(),
            Recipe(accumulation=2, parallel=parallel | options, steps=2),
        )[0]
        for options in ({}, OFFLOAD)
    )  # fmt: skip
    assert bits_of(ours) == bits_of(plain)


HIDDEN, FP32, TOKENS = 32, 4, 256


def after_a_forward(folder, parallel):
    """Bytes alive on (host, device) once a forward is over and its backward still to come."""
    from support.live_memory import LivePeak
    from support.training import build_step, micro_batches_of

    from shardyard.evaluate.forwards import forward_parts

    entries: weakref.WeakSet[Any] = weakref.WeakSet()

    class Watched(offload.Entry):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            entries.add(self)

    built, step, _ = build_step(folder, Recipe(parallel=parallel))
    ids = [3 + i % 90 for i in range(TOKENS)]
    batches = micro_batches_of([(ids, [-100] * (TOKENS - 4) + ids[:4])], 1, 0, 1)
    step(batches, step=1, lr=0.0)
    offload.Entry = Watched
    (part,) = forward_parts(batches[0], 1, device=step.device, packed=True)
    with LivePeak() as memory:
        loss = built.model(**part)
        everything = memory.now()
        host = sum(entry.host.nbytes for entry in entries)
        loss.backward()
    return host, everything - host, len(entries)


def test_what_stays_on_the_device_does_not_grow_with_the_layers(ranks, tmp_path):
    def run(layers, **parallel):
        folder = write_tiny_model(
            tmp_path / f"{layers}", "parity_dense", num_hidden_layers=layers,
            layer_types=["full_attention"] * layers,
        )  # fmt: skip
        return ranks.run(1, after_a_forward, folder, OFFLOAD | parallel)[0]

    (host_4, device_4, left_4), (host_8, device_8, left_8) = run(4), run(8)
    assert device_8 == device_4 and host_8 > host_4
    assert left_4 == left_8 == 0, "nothing outlives the backward"
    again_4, again_8 = run(4, recompute="full"), run(8, recompute="full")
    assert again_8[1] == again_4[1]
    assert again_8[0] - again_4[0] == 4 * TOKENS * HIDDEN * FP32, "a block's input, once"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.sin()).exp().cos()


def chained(count: int) -> tuple[list[Block], list[weakref.ref[offload.Record]]]:
    chain, blocks, records = offload.Chain(None), [Block() for _ in range(count)], []
    begin = chain.begin

    def noted(index: int) -> offload.Record:
        record = begin(index)
        records.append(weakref.ref(record))
        return record

    chain.begin = noted  # type: ignore[method-assign]  # pyright: ignore[reportAttributeAccessIssue]
    for index, block in enumerate(blocks):
        block.forward = functools.partial(offload._offloaded, block.forward, chain, index, block)
    return blocks, records


def on_the_way(record: weakref.ref[offload.Record]) -> bool:
    found = record()
    return found is not None and any(entry._arrival is not None for entry in found.entries)


def test_the_backward_fetches_one_block_ahead():
    blocks, records = chained(4)
    x, seen = torch.randn(8, 64, requires_grad=True), []
    for block in blocks:
        x = block(x)
        # Before this block's backward, and so after that of the one behind it.
        x.register_hook(lambda grad: seen.append([on_the_way(record) for record in records]) or grad)
    assert not any(map(on_the_way, records))
    x.sum().backward()
    assert seen == [
        [False, False, False, False],
        [False, False, True, False],
        [False, True, False, False],
        [True, False, False, False],
    ]
    assert [record() for record in records] == [None] * 4


def test_each_forward_is_a_chain_of_its_own():
    blocks, records = chained(2)
    graphs = [blocks[1](blocks[0](torch.randn(8, 64, requires_grad=True))) for _ in range(2)]
    alive = [record() for record in records]
    before = [record and record.before for record in alive]
    assert before == [None, alive[0], None, alive[2]] and None not in alive
    del graphs


def test_a_storage_travels_once_and_parameters_and_what_is_shared_stay():
    block, chain = nn.Linear(64, 64, bias=False), offload.Chain(None)
    shared, hidden = torch.randn(64, 64), torch.randn(64, 64)
    before = hidden.clone()
    keeping = offload._Keeping(chain, chain.begin(0), block, [shared])
    one, other = keeping.pack(hidden), keeping.pack(hidden.t()[3:])
    assert one.entry is other.entry and keeping.pack(hidden.add_(1)).entry is not one.entry
    assert isinstance(keeping.pack(block.weight.detach().t()), torch.Tensor)
    assert keeping.pack(shared[2:]).data_ptr() == shared[2:].data_ptr()
    keeping.end()
    back = offload.unpack(other)
    assert torch.equal(back, before.t()[3:]) and back.stride() == hidden.t()[3:].stride()
    small = torch.ones(3)
    assert keeping.pack(small) is small


def test_patterns_without_the_switch_are_told(tmp_path):
    loaded = load(tmp_path, "parallel: {activation_offload_modules: [model.layers.0]}")
    assert any("activation_offload_modules: has no effect" in line for line in loaded.warnings)
