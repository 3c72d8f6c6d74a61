"""A run of the reference goes on from its checkpoint, on other layouts, as its own plain loop would."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import write_tiny_model
from support.reference_run import LR, TRAINING, Written, train_and_save
from support.training import Recipe, build_step, make_rows, micro_batches_of

from shardyard.data.order import epoch_order
from shardyard.errors import UserError

ROWS, SEED, BATCH = make_rows(10), 7, 4
BEFORE, AFTER = 4, 3
# Epochs of 10 rows are updates of 4, 4 and 2 rows. The fourth is the first of the second epoch.
PLACE = 10 + 4
CUTS = [(1, 4, 8), (1, 8, 10), (2, 0, 4)]


def batches() -> list[list]:
    """The reference's own order, whatever it is, then ours."""
    own = [[ROWS[(3 * n + k) % 10] for k in range(BATCH)] for n in range(BEFORE)]
    ours = [[ROWS[i] for i in epoch_order(10, SEED, epoch)[begin:end]] for epoch, begin, end in CUTS]
    return own + ours


def go_on(model: Path, checkpoint: Path, out: Path, parallel: dict):
    """(state, losses of the next steps, warnings, how often AdamW has counted) of a resumed run."""
    import logging

    import torch

    from shardyard.checkpoint import CheckpointStore
    from shardyard.data.order import EpochOrder
    from shardyard.data.sampler import ElasticSampler
    from shardyard.train.differences import RunFacts
    from shardyard.train.resume import restore

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    handler = Warnings(logging.WARNING)
    logging.getLogger("shardyard").addHandler(handler)
    built, step, meshes = build_step(model, Recipe(parallel=parallel, training=TRAINING))
    with torch.no_grad():  # whatever the run has loaded before is not what it goes on with
        for parameter in built.model.parameters():
            parameter.zero_()
    order = EpochOrder(10, seed=SEED, shuffle=True)
    sampler = ElasticSampler(order, global_batch=BATCH, drop_last=False, num_train_epochs=3, max_steps=-1)
    store = CheckpointStore(out, save_total_limit=None)
    try:
        state, before = restore(
            store, str(checkpoint), built, step.optimizer, "ours", RunFacts({}), sampler=sampler
        )
        assert before is None
        losses, cursor = [], state.cursor
        for number in range(state.step + 1, state.step + 1 + AFTER):
            batch = sampler.global_batch_at(cursor)
            rows = [ROWS[i] for i in batch.indices]
            pieces = micro_batches_of(rows, parallel.get("pp_size", 1), meshes.dp_rank, meshes.dp_size)
            losses.append(step(pieces, step=number, lr=LR).loss)
            cursor = batch.end
    finally:
        logging.getLogger("shardyard").removeHandler(handler)
    return state, losses, said, {int(entry["step"]) for entry in step.optimizer.state.values()}


CASES = [
    pytest.param("parity_dense", Written(), 1, {}, id="nested, one process"),
    pytest.param("parity_dense", Written("flattened"), 2, {}, id="flattened, FSDP 2"),
    pytest.param("parity_moe", Written("two", merged=True), 2, {"ep_size": 2}, id="two optimizers, EP 2"),
    *(
        pytest.param(family, written, world, parallel, id=name, marks=pytest.mark.soak)
        for name, family, written, world, parallel in (
            ("numbers, PP 2, tied", "parity_dense", Written(steps_as_numbers=True), 2, {"pp_size": 2}),
            ("TP 2, tied", "parity_dense", Written("flattened"), 2, {"tp_size": 2}),
            ("merged, one process", "parity_moe", Written("flattened", merged=True), 1, {}),
            ("merged, FSDP 3", "parity_moe", Written(merged=True), 3,
             {"ignored_modules": ["model.layers.{*}.mlp.experts"]}),
            ("merged, EP 2 x EFSDP 2", "parity_moe", Written("two", merged=True), 4, {"ep_size": 2}),
            ("plain experts, PP 2 x EP 2", "parity_moe", Written("two"), 4, {"pp_size": 2, "ep_size": 2}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "written", "world", "parallel"), CASES)
def test_the_next_losses_are_those_of_the_reference_s_loop(ranks, tmp_path, family, written, world, parallel):
    model, checkpoint = write_tiny_model(tmp_path / "hf", family), tmp_path / f"ref/global_step_{BEFORE}"
    wanted = ranks.run(
        1, train_and_save, model, batches(), BEFORE, checkpoint, written, init_process_group=False
    )[0]
    state, losses, said, counts = ranks.run(world, go_on, model, checkpoint, tmp_path / "out", parallel)[0]
    assert (state.step, state.cursor, state.consumed_samples) == (BEFORE, PLACE, PLACE)
    assert (state.consumed_tokens, state.data_order) == (0, "ours")
    assert losses == pytest.approx(wanted[BEFORE:], rel=1e-6)
    assert counts == {BEFORE + AFTER}
    assert len(said) == 1 and "order of the data cannot be repeated" in said[0] and "schedule" in said[0]
    assert not checkpoint.with_suffix(".ran").exists()


def look(root: Path) -> list:
    """What the run folder says of names in training.resume_from_checkpoint, and places in the data."""
    import torch
    import torch.distributed.checkpoint as dcp

    from shardyard.config import Config
    from shardyard.data.order import EpochOrder
    from shardyard.data.sampler import ElasticSampler
    from shardyard.train.resume import _place_after
    from shardyard.train.run_folder import look_at_output_dir, nothing_left

    checkpoint = root / "ref/checkpoints/global_step_4"
    dcp.save({"model.model.model.w": torch.ones(2)}, checkpoint_id=checkpoint, no_dist=True)
    (root / "config").mkdir()
    said: list = []
    for wanted, out in (
        (checkpoint, "out"),
        (checkpoint, "config"),
        (root / "ref", "out"),
        (root / "ref/checkpoints/global_step_5", "out"),
    ):
        training = {"output_dir": str(root / out), "resume_from_checkpoint": str(wanted)}
        model = {"model_name_or_path": str(root), "config_name_or_path": str(root / "config")}
        data = {"dataset": "d", "template": "qwen3"}
        config = Config.model_validate({"model": model, "data": data, "training": training})
        try:
            found = look_at_output_dir(config)
            said.append((found, nothing_left(config, found, 1)))
        except UserError as error:
            said.append(str(error))
    order = EpochOrder(10, seed=SEED, shuffle=True)
    whole = ElasticSampler(order, global_batch=4, drop_last=True, num_train_epochs=2, max_steps=-1)
    said += [_place_after("x", steps, whole) for steps in (0, 2, 3, 4)]
    try:
        _place_after("x", 5, whole)
    except UserError as error:
        said.append(str(error))
    return said


def test_a_folder_is_named_by_its_path_and_the_place_follows_this_run_s_updates(ranks, tmp_path):
    found, taken, above, absent, *places, beyond = ranks.run(1, look, tmp_path, init_process_group=False)[0]
    checkpoint = tmp_path / "ref/checkpoints/global_step_4"
    assert found == (str(checkpoint), "")
    assert f"{tmp_path / 'config'} is what this run reads from" in taken
    assert f"did you mean {checkpoint}?" in above
    assert "global_step_5 does not exist" in absent
    # Epochs of 10 are two updates of 4; what is left over of the first is passed over with the third.
    assert places == [(0, 0), (8, 8), (14, 12), (18, 16)]
    assert "5 updates" in beyond and "4 samples in a step" in beyond and "ends after 4" in beyond
