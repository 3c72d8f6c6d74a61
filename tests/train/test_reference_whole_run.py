"""A whole run that goes on from a checkpoint of the reference."""

from __future__ import annotations

from support.models import write_tiny_model
from support.reference_run import Written, train_and_save
from support.training import make_rows
from support.whole_runs import latest_checkpoint, metrics, train, write_numbered, write_workspace


def test_a_run_goes_on_from_the_reference_with_its_own_data_order(ranks, tmp_path):
    folder = write_workspace(tmp_path)
    write_numbered(folder / "rows.jsonl", range(10))
    model = write_tiny_model(folder / "hf", "qwen3", vocab_size=320)
    checkpoint = folder / "ref/checkpoints/global_step_2"
    ranks.run(
        1, train_and_save, model, [make_rows(4)] * 3, 2, checkpoint, Written(), init_process_group=False
    )
    words = ("--training.gradient_accumulation_steps", "4", "--training.max_steps", "4")
    fresh = train(ranks, folder, "fresh", *words)
    resumed = train(ranks, folder, "out", *words, "--training.resume_from_checkpoint", str(checkpoint))
    assert sorted(resumed.steps) == [3, 4]
    assert all(resumed.steps[step] == fresh.steps[step] for step in (3, 4))
    # Epochs of 10 rows are updates of 4, 4 and 2 samples: the third is 2.
    assert [record["consumed_samples"] for record in metrics(folder, "out")] == [10, 14]
    assert "order of the data cannot be repeated" in resumed.log
    assert latest_checkpoint(folder, "out") == 4
    assert not checkpoint.with_suffix(".ran").exists()
