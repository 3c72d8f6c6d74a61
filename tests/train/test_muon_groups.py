"""Parameter groups of a run: the same on every stage, told once; Muon takes the matrices of each."""

from __future__ import annotations

from support.parity import write_parity_model
from support.training import Recipe, build_step

TRAINING = {
    "optimizer": "muon", "weight_decay": 0.1,
    "parameter_groups": ({"patterns": ["model.embed_tokens.*"], "lr_scale": 0.5},),
}  # fmt: skip


def what_is_told(folder, parallel):
    """The report; and of each parameter of this rank its optimizer, its scale and its decay."""
    from shardyard.config import TrainingConfig
    from shardyard.train.reports import group_report

    built, step, meshes = build_step(folder, Recipe(parallel=parallel, training=TRAINING))
    training = TrainingConfig(output_dir="unused", **TRAINING)
    lines = group_report(built.model, training, meshes, step.group)
    found = {
        name: (type(part).__name__, group["lr_scale"], group["weight_decay"])
        for part in step.optimizer.parts
        for group in part.param_groups
        for name in group["param_names"]
    }
    return [" ".join(line.split()) for line in lines], found


def test_a_tied_weight_has_one_rate_on_both_stages_and_counts_once(ranks, tmp_path):
    """Four layers of 7 matrices (11,520 elements) and 4 norms (80), hidden 32, a vocabulary of 200."""
    folder = write_parity_model(tmp_path / "dense", "dense")
    first, last = ranks.run(2, what_is_told, folder, {"pp_size": 2})
    for lines, _ in (first, last):
        assert lines == [
            "parameter groups, the first that matches:",
            "model.embed_tokens.* lr x 0.5, weight decay 0.1: 1 parameters of 6,400 elements",
            "others lr x 1, weight decay 0.1: 28 parameters of 46,080 elements",
            "others (norms and biases) lr x 1, weight decay 0: 17 parameters of 352 elements",
        ]
    tied = ("AdamW", 0.5, 0.1)
    assert first[1]["model.embed_tokens.weight"] == last[1]["model.embed_tokens.weight"] == tied
    assert first[1]["model.layers.0.mlp.up_proj.weight"] == ("Muon", 1.0, 0.1)
    assert last[1]["model.layers.3.self_attn.q_norm.weight"] == ("AdamW", 1.0, 0.0)
    assert len(first[1]) == 1 + 22 and len(last[1]) == 1 + 22 + 1
