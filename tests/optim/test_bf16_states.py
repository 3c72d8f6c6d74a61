"""AdamW with moments in bf16: what is drawn, that it is unbiased, and what it costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.live_memory import bytes_kept

from shardyard.optim.bf16_states import BF16AdamW
from shardyard.optim.rounding import Places, draws, key_of, mix_, round_into


def rounded(value: float, drawn: torch.Tensor) -> torch.Tensor:
    target = torch.empty(len(drawn), dtype=torch.bfloat16)
    round_into(target, torch.full((len(drawn),), value), drawn.clone())
    return target.double()


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -2.7e8, 0.0, 1.0, 2.0**-130])
def test_the_mean_over_all_draws_is_the_number_itself(value):
    """Exactly: of the 65536 equally likely draws as many round up as the lower 16 bits say."""
    every = rounded(value, torch.arange(2**16, dtype=torch.int32))
    exact = torch.tensor(value, dtype=torch.float32).double().item()
    assert every.mean().item() == pytest.approx(exact, rel=1e-13, abs=0)
    assert len(every.unique()) == (1 if exact == torch.tensor(exact).bfloat16().double().item() else 2)


def test_draws_are_uniform_and_those_of_two_moments_two_elements_and_two_updates_apart():
    count = 2**18
    places = torch.arange(count, dtype=torch.int32)
    one, other = draws(places.clone(), key_of(1, 7, "a"))
    later, _ = draws(places.clone(), key_of(1, 8, "a"))
    for drawn in (one, other, later):
        cells = torch.bincount(drawn >> 8, minlength=256).double()
        expected = count / 256
        chi = float(((cells - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 6 * math.sqrt(2 * 255), "chi squared of 255 degrees: mean 255, variance 510"
    for left, right in ((one, other), (one, later), (one[1:], one[:-1])):
        correlation = np.corrcoef(left.numpy(), right.numpy())[0, 1]
        assert abs(correlation) < 6 / math.sqrt(count)


def test_the_hash_is_that_of_its_paper():
    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    numbers = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 123456789, 0xDEADBEEF]
    signed = torch.tensor([n - 2**32 if n >= 2**31 else n for n in numbers], dtype=torch.int32)
    assert [n % 2**32 for n in mix_(signed).tolist()] == [lowbias32(n) for n in numbers]


def one_parameter(values: torch.Tensor, name: str = "w", seed: int = 0, **options: float):
    parameter = torch.nn.Parameter(values.clone())
    betas = (options.get("beta1", 0.9), options.get("beta2", 0.95))
    group = {"params": [(name, parameter)], "weight_decay": options.get("weight_decay", 0.0)}
    return parameter, BF16AdamW([group], lr=options.get("lr", 1e-2), betas=betas, eps=1e-8, seed=seed)


def test_the_first_update_is_exactly_that_of_torch_and_later_ones_follow_it():
    """Rounding touches only what is carried on; then each moment is off by 1/128 of itself at most."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 50, generator=generator)
    ours, optimizer = one_parameter(start, weight_decay=0.1)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for update in range(10):
        ours.grad = torch.randn(3, 50, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        limit = 1e-6 if update == 0 else 1e-2 * 0.04 * update  # lr x (1/128 of m + half of that of v, twice)
        assert float((ours - theirs).detach().abs().max()) <= limit


def test_a_second_moment_reaches_its_mean_where_rounding_to_the_nearest_stands_still():
    """With a constant gradient g, v after n updates is g^2 (1 - beta2^n); many elements give its mean."""
    beta2, count, updates = 0.996, 1024, 600
    parameter, optimizer = one_parameter(torch.zeros(count), beta2=beta2, lr=0.0)
    parameter.grad = torch.ones(count)
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(updates):
        optimizer.step()
        nearest = (nearest.float() * beta2 + (1 - beta2)).bfloat16()
    wanted = 1 - beta2**updates
    found = optimizer.state[parameter]["exp_avg_sq"].double()
    # Near 1 a step of bf16 is 1/256 (1/128 above); the errors of about 1/(1 - beta2^2) updates last.
    deviation = math.sqrt(1 / 4 / 256**2 / (1 - beta2**2))
    assert abs(float(found.mean()) - wanted) < 5 * deviation / math.sqrt(count)
    assert float(nearest) < 0.7 * wanted, "the nearest neighbour is where it stood"


def test_moments_are_half_the_bytes_and_no_update_needs_more_than_a_piece_of_room():
    parameter, optimizer = one_parameter(torch.zeros(1000, 30))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert bytes_kept([state["exp_avg"], state["exp_avg_sq"]]) == 2 * 2 * parameter.numel()


def test_draws_depend_on_the_name_the_seed_and_the_update():
    def moment(**options):
        parameter, optimizer = one_parameter(torch.zeros(1000), **options)
        parameter.grad = torch.linspace(1, 2, 1000)
        optimizer.step()
        return optimizer.state[parameter]["exp_avg"].clone()

    assert torch.equal(moment(), moment())
    assert not torch.equal(moment(), moment(name="v"))
    assert not torch.equal(moment(), moment(seed=1))


def places_on_a_mesh(kind):
    """(own places, the same from a whole tensor of numbers cut by torch) of a [8, 10, 4] tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placements = {
        "rows": [Shard(0), Shard(0)], "columns": [Shard(1), Shard(1)], "both": [Shard(0), Shard(1)],
        "strided": [_StridedShard(0, split_factor=2), Shard(0)], "last": [Shard(2), Shard(0)],
    }[kind]  # fmt: skip
    whole = torch.arange(8 * 10 * 4, dtype=torch.int32).view(8, 10, 4)
    cut = distribute_tensor(whole, mesh, placements)
    part = cut.to_local().reshape(-1)
    places = Places(cut)
    pieces = [places.of(begin, min(begin + 7, len(part)), part.device) for begin in range(0, len(part), 7)]
    return dist.get_rank(), torch.cat(pieces or [part[:0]]).tolist(), part.tolist()


@pytest.mark.parametrize("kind", ["rows", "columns", "both", "strided", "last"])
def test_an_element_has_the_same_place_whoever_holds_it(ranks, kind):
    for _, found, wanted in ranks.run(4, places_on_a_mesh, kind):
        assert found == wanted
