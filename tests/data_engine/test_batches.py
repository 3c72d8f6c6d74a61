"""Collation and the loader, against lists in plain Python."""

import os
import random
import signal

import numpy as np
import pytest
import torch

from shardyard.data.batches import BatchLoader, collate
from shardyard.data.order import EpochOrder, PackedOrder
from shardyard.data.sampler import ElasticSampler
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.errors import UserError


def make_sample(index, length=None, doc_lens=None):
    """Ids that name their sample: 100 x index, 100 x index + 1, ...; no label at a document's end."""
    doc_lens = doc_lens or (length if length is not None else 1 + index % 4,)
    ids = 100 * index + np.arange(sum(doc_lens), dtype=np.int32)
    labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
    labels[np.cumsum(doc_lens) - 1] = IGNORE_INDEX
    return Sample(ids, labels, doc_lens)


def make_loader(store, sampler, **options):
    options = {"dp_rank": 0, "dp_size": 1, "per_device": 2, **options}
    return BatchLoader(store, sampler, **options)


def make_sampler(num_samples, global_batch, epochs=1.0, max_steps=-1):
    return ElasticSampler(
        EpochOrder(num_samples, seed=3, shuffle=True),
        global_batch=global_batch,
        drop_last=False,
        num_train_epochs=epochs,
        max_steps=max_steps,
    )


def contents(loader):
    """Everything a step reads, as plain values."""
    return [
        (
            step.epoch,
            step.start,
            step.end,
            [
                (
                    m.input_ids.tolist(),
                    m.labels.tolist(),
                    m.position_ids.tolist(),
                    m.doc_lens,
                    m.sample_ids,
                    m.num_labelled,
                )
                for m in step.micro_batches
            ],
        )
        for step in loader
    ]


def test_rows_lie_end_to_end_and_positions_restart():
    micro_batch = collate([make_sample(1, 3), make_sample(0, doc_lens=(2, 1))], [11, 7], filler_token=0)
    assert micro_batch.input_ids.tolist() == [100, 101, 102, 0, 1, 2]
    assert micro_batch.labels.tolist() == [101, 102, -100, 1, -100, -100]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0]
    assert micro_batch.doc_lens == (3, 2, 1)
    assert micro_batch.sample_ids == (11, 7)
    assert micro_batch.num_labelled == 3
    assert micro_batch.num_tokens == 6
    tensors = (micro_batch.input_ids, micro_batch.labels, micro_batch.position_ids)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_a_filler_is_one_token_that_counts_for_nothing():
    filler = collate([], [], filler_token=5)
    assert filler.input_ids.tolist() == [5]
    assert filler.labels.tolist() == [IGNORE_INDEX]
    assert (filler.doc_lens, filler.sample_ids, filler.num_labelled, filler.num_tokens) == ((1,), (), 0, 0)


def test_a_sample_whose_parts_do_not_fit_is_refused():
    broken = Sample(np.zeros(3, np.int32), np.zeros(3, np.int32), doc_lens=(2,))
    with pytest.raises(ValueError, match=r"samples \[4\]"):
        collate([broken], [4], filler_token=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_all_ranks_together_read_every_sample_once_an_epoch(world_size):
    store = [make_sample(index) for index in range(13)]
    ranks = [
        list(
            make_loader(store, make_sampler(13, 4 * world_size, epochs=2.0), dp_rank=rank, dp_size=world_size)
        )
        for rank in range(world_size)
    ]
    assert len({len(steps) for steps in ranks}) == 1
    seen = {0: [], 1: []}
    for steps in zip(*ranks, strict=True):
        assert len({(len(s.micro_batches), s.epoch, s.start, s.end) for s in steps}) == 1
        ids = [i for s in steps for m in s.micro_batches for i in m.sample_ids]
        assert len(ids) == steps[0].end - steps[0].start
        assert sum(m.num_tokens for s in steps for m in s.micro_batches) == sum(1 + i % 4 for i in ids)
        seen[steps[0].epoch] += ids
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(13))


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_change_nothing(persistent):
    store = [make_sample(index) for index in range(11)]
    options = {"dp_rank": 1, "dp_size": 2}
    alone = contents(make_loader(store, make_sampler(11, 8, epochs=2.5), **options))
    loader = make_loader(
        store,
        make_sampler(11, 8, epochs=2.5),
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=persistent,
        pin_memory=True,
        **options,
    )
    assert len(loader) == len(alone) == 2 + 2 + 1
    assert contents(loader) == alone


@pytest.mark.parametrize("resumed_world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_inside_epoch_one_at_another_world_size_sees_each_sample_once(resumed_world, workers):
    store = [make_sample(index) for index in range(10)]
    ids, cursor = [], 0
    for step, batches in enumerate(
        zip(
            *(
                make_loader(store, make_sampler(10, 4, 3.0), dp_rank=r, dp_size=2, per_device=1)
                for r in range(2)
            ),
            strict=True,
        )
    ):
        ids += [i for b in batches for m in b.micro_batches for i in m.sample_ids]
        cursor = batches[0].end
        if step == 3:  # one batch into epoch 1
            break
    assert cursor == 14
    sampler = make_sampler(10, 2 * resumed_world, 3.0)
    loaders = [
        make_loader(
            store,
            sampler,
            dp_rank=r,
            dp_size=resumed_world,
            per_device=2,
            start_cursor=cursor,
            num_workers=workers,
        )
        for r in range(resumed_world)
    ]
    for batches in zip(*loaders, strict=True):
        ids += [i for b in batches for m in b.micro_batches for i in m.sample_ids]
    assert [sorted(ids[begin : begin + 10]) for begin in (0, 10, 20)] == [list(range(10))] * 3


def test_max_steps_gives_that_many_batches_also_after_a_resume():
    store = [make_sample(index) for index in range(5)]
    unbroken = contents(make_loader(store, make_sampler(5, 2, max_steps=8)))
    assert len(unbroken) == 8
    assert [step[0] for step in unbroken] == [0, 0, 0, 1, 1, 1, 2, 2]
    resumed = make_loader(store, make_sampler(5, 2, max_steps=8), start_cursor=unbroken[4][1], start_step=4)
    assert contents(resumed) == unbroken[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_random_state_alone(workers):
    store = [make_sample(index) for index in range(6)]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    assert contents(make_loader(store, make_sampler(6, 2, epochs=2.0), num_workers=workers))
    assert before == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


def test_starting_workers_after_tokenising_prints_nothing(capfd):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.encode_batch(["a"] * 100)  # now the library has used its threads
    store = [make_sample(index) for index in range(4)]
    assert len(contents(make_loader(store, make_sampler(4, 2), num_workers=1))) == 2
    assert capfd.readouterr().err == ""


class DeadlyStore(list):
    """A store whose reader is killed, as the kernel does when memory runs out."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_named_with_the_keys_to_turn():
    loader = make_loader(DeadlyStore([make_sample(0)] * 4), make_sampler(4, 2), num_workers=1)
    with pytest.raises(UserError, match=r"dataloader_num_workers.*died"):
        list(loader)


def test_options_that_only_workers_have_are_refused_without_workers():
    store = [make_sample(0)]
    with pytest.raises(UserError, match="dataloader_persistent_workers"):
        make_loader(store, make_sampler(1, 1), persistent_workers=True)
    with pytest.raises(UserError, match="dataloader_prefetch_factor"):
        make_loader(store, make_sampler(1, 1), prefetch_factor=2)


@pytest.mark.parametrize("merge", [False, True])
def test_a_pack_is_one_unit_whose_samples_part_or_merge(merge):
    lengths = np.array([3, 2, 2, 1])
    order = PackedOrder(EpochOrder(4, seed=0, shuffle=False), lengths, capacity=4, window=4)
    sampler = ElasticSampler(order, global_batch=2, drop_last=False, num_train_epochs=1.0, max_steps=-1)
    store = [make_sample(index, int(length)) for index, length in enumerate(lengths)]
    (step,) = make_loader(store, sampler, merge_packs=merge)
    (batch,) = step.micro_batches
    assert (step.start, step.end) == (0, 2), "packs are what a batch counts"
    assert batch.sample_ids == (0, 3, 1, 2)
    assert batch.input_ids.tolist() == [0, 1, 2, 300, 100, 101, 200, 201]
    assert batch.labels.tolist() == [1, 2, -100, -100, 101, -100, 201, -100]
    assert batch.doc_lens == ((4, 4) if merge else (3, 1, 2, 2))
    assert batch.position_ids.tolist() == ([0, 1, 2, 3] * 2 if merge else [0, 1, 2, 0, 0, 1, 0, 1])
