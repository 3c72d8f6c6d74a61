"""Machines that were started with other settings are refused, before anything depends on one."""

from __future__ import annotations

import pytest


def verdict(overrides_by_rank):
    """What this rank is told, given its own overrides."""
    import torch.distributed as dist

    from shardyard.config import load_config
    from shardyard.device import ProcessGroup
    from shardyard.errors import UserError
    from shardyard.train.same_settings import refuse_different_settings

    rank = dist.get_rank()
    words = ["--model.model_name_or_path", "m", "--data.dataset", "d", "--data.template", "null"]
    words += ["--training.output_dir", f"out{rank}", *overrides_by_rank[rank]]
    group = ProcessGroup(dist.HashStore(), rank, dist.get_world_size())
    try:
        refuse_different_settings(load_config(words).config, group)
    except UserError as error:
        return str(error)
    return ""


def test_equal_settings_pass_though_folders_and_workers_differ(ranks):
    own = [["--training.dataloader_num_workers", str(n), "--model.cache_dir", f"cache{n}"] for n in range(2)]
    assert ranks.run(2, verdict, own) == ["", ""]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (["--training.lr", "1e-4"], "training.lr is 1e-05 on rank(s) 0, 2, 0.0001 on rank(s) 1"),
        (["--parallel.tp_size", "3"], "parallel.tp_size is 1 on rank(s) 0, 2, 3 on rank(s) 1"),
        (["--parallel.recompute", "true"], "parallel.recompute is False on rank(s) 0, 2, True on rank(s) 1"),
    ],
)
def test_every_rank_is_told_who_has_which_value(ranks, other, told):
    messages = ranks.run(3, verdict, [[], other, []])
    assert len(set(messages)) == 1
    assert told in messages[0] and "same file and overrides" in messages[0]
