"""Rules of the data and of validation: what excludes each other, what needs what, what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import fault_of, load

from shardyard.config.data_rules import probabilities, split_shares

EVAL = "eval_dataset: v.jsonl"
STREAM = "training: {max_steps: 5}\ndata: {streaming: true, "
MG = "training: {stage: pt, max_steps: 5}\ndata: {data_manager_type: mg, "


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("training: {stage: pt}", ("training.stage", "data.data_manager_type")),
        ("data: {train_on_prompt: true, template: gpt}", ("data.train_on_prompt", "data.template")),
        ("data: {create_attention_mask_in_dataloader: true}", ("will not be", "data.reset_attention_mask")),
        (
            "data: {no_shared_storage: true, data_shared_file_system: true}",
            ("data.no_shared_storage", "data.data_shared_file_system"),
        ),
        ("data: {interleave_probs: '0.5,0.5'}", ("data.interleave_probs", "data.mix_strategy")),
        (
            "data: {dataset: [a, b], mix_strategy: interleave_over, interleave_probs: '1,2,3'}",
            ("3 shares for the 2 data sets",),
        ),
        ("data: {mix_strategy: interleave_under, interleave_probs: '0.5,x'}", ("'0.5,x'",)),
        ("data: {mix_strategy: interleave_under, interleave_probs: '0.5,0'}", ("above 0",)),
        ("data: {mix_strategy: interleave_under, interleave_probs: 'nan,1'}", ("'nan,1'",)),
        ("data: {mix_strategy: interleave_under, interleave_probs: 'inf,1'}", ("'inf,1'",)),
        (MG + "split: 'nan,1'}", ("data.split", "'nan,1'")),
        (MG + "split: 'inf,1'}", ("data.split", "'inf,1'")),
        ("data: {data_manager_type: mg, val_size: 3}", ("data.val_size", "data.eval_dataset")),
        (
            "training: {early_stopping_patience: 2}\ndata: {data_manager_type: mg, split: '9,1'}",
            ("training.early_stopping_patience", "needs validation data"),
        ),
        (
            "data: {neat_packing: true, cross_document_attention: true}",
            ("data.neat_packing", "data.cross_document_attention"),
        ),
        ("data: {streaming: true}", ("data.streaming", "training.max_steps")),
        (STREAM + "val_size: 0.1}", ("data.val_size", "data.streaming")),
        (STREAM + "val_size: 3}", ("data.val_size", "data.streaming")),
        (MG + "streaming: true, split: '98,2,0'}", ("data.split", "data.streaming")),
        (MG + "streaming: true, split: '98,0,2'}", ("data.split", "data.streaming")),
        (STREAM + "max_samples: 3}", ("data.max_samples", "data.streaming")),
        (STREAM + "tokenized_path: there}", ("data.tokenized_path", "data.streaming")),
        (STREAM + "data_manager_type: mg}", ("data.streaming", "data.data_manager_type")),
        (MG + "streaming: true, index_compat: megatron}", ("data.index_compat", "data.streaming")),
        ("data: {index_compat: megatron}", ("data.index_compat", "data.data_manager_type")),
        (
            "training: {stage: pt, disable_shuffling: true}\n"
            "data: {data_manager_type: mg, index_compat: megatron}",
            ("data.index_compat", "training.disable_shuffling"),
        ),
        (
            MG + "dataset: [a, b], mix_strategy: interleave_over, index_compat: megatron}",
            ("data.index_compat", "data.mix_strategy"),
        ),
        (MG + "split: '0,1'}", ("data.split", "'0,1'")),
        (MG + "split: a}", ("data.split",)),
        (MG + "val_size: 0.1}", ("data.val_size", "data.split")),
        (MG + "split: '9,1', " + EVAL + "}", ("data.eval_dataset", "data.split")),
        ("data: {val_size: 0.1, " + EVAL + "}", ("data.eval_dataset", "data.val_size")),
        ("data: {val_size: 1.0}", ("data.val_size", "1.0")),
        ("data: {val_size: 2.5}", ("data.val_size", "2.5")),
        ("data: {val_size: -1}", ("data.val_size",)),
        ("training: {early_stopping_patience: 3}", ("training.early_stopping_patience", "data.eval_dataset")),
        ("training: {keep_best_checkpoint: true}", ("training.keep_best_checkpoint", "data.eval_dataset")),
        (
            "training: {load_best_model_at_end: true}\ndata: {" + EVAL + "}",
            ("training.load_best_model_at_end", "training.keep_best_checkpoint"),
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_its_names(
    tmp_path: Path, text: str, keys: tuple[str, ...]
) -> None:
    fault = fault_of(tmp_path, text)
    for key in keys:
        assert key in fault


@pytest.mark.parametrize(
    "text",
    [
        "data: {val_size: 100}",
        "data: {val_size: 0.1}",
        "data: {val_size: 1}",
        "data: {val_size: 0}",
        "data: {val_size: 100.0}",
        "data: {dataset: [a, {file_name: b.jsonl}], mix_strategy: interleave_over, interleave_probs: '1,2'}",
        "data: {packing: true, cross_document_attention: true}",
        STREAM + "packing: true, " + EVAL + "}",
        MG + "split: '98,1,1', index_compat: megatron}",
        "training: {early_stopping_patience: 3, keep_best_checkpoint: true, load_best_model_at_end: true}\n"
        "data: {" + EVAL + "}",
        "data: {data_manager_type: mg}",
        MG + "dataset: {file_name: [a, b]}, mix_strategy: interleave_over, interleave_probs: '1,2'}",
    ],
)
def test_near_misses_load(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_val_size_keeps_the_difference_between_a_count_and_a_share(tmp_path: Path) -> None:
    size = load(tmp_path, "data: {val_size: 1}").config.data.val_size
    assert size == 1 and isinstance(size, int)
    share = load(tmp_path, "", "data.val_size=0.25").config.data.val_size
    assert share == 0.25 and isinstance(share, float)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data: {mix_strategy: interleave_over}", "data.mix_strategy"),
        ("training: {eval_steps: 5}", "training.eval_steps"),
        ("training: {eval_on_start: true}", "training.eval_on_start"),
        ("data: {cross_document_attention: true}", "data.cross_document_attention"),
        (MG + "packing: true, cross_document_attention: true}", "data.cross_document_attention"),
        (
            "data: {data_manager_type: mg, packing: true, cross_document_attention: true}",
            "data.cross_document_attention",
        ),
        ("data: {data_manager_type: mg, split: '9,1'}", "data.split"),
        ("data: {eval_on_each_dataset: true}", "data.eval_on_each_dataset"),
        ("data: {split: '98,1,1'}", "data.split"),
        ("data: {append_eod: true}", "data.append_eod"),
        (MG + "packing: true}", "data.packing"),
        (MG + "mask_history: true}", "data.mask_history"),
        ("data: {data_manager_type: mg, template: qwen3}", "data.template"),
    ],
)
def test_settings_without_effect_warn(tmp_path: Path, text: str, key: str) -> None:
    warned = load(tmp_path, text, "--data.dataset", "x").warnings
    assert any(f"{key}: has no effect" in warning for warning in warned), warned


def test_shares_are_read_as_written() -> None:
    assert split_shares("98,1,1") == (98, 1, 1)
    assert split_shares("100") == (100, 0, 0)
    assert probabilities("3,1") == (0.75, 0.25)
