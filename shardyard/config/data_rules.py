"""Rules of the data and of validation: pairs that exclude each other, and switches without what they need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.config.rules import Checked
    from shardyard.config.sections.data import DataConfig

_VALIDATION = ("data.eval_dataset", "data.val_size", "data.split")


def check_data(checked: Checked) -> None:
    """Run every rule of this module; faults and warnings go to ``checked.notes``."""
    _check_stage(checked)
    _check_masks(checked)
    _check_mixing(checked)
    _check_packing(checked)
    _check_streaming(checked)
    _check_megatron(checked)
    _check_validation_data(checked)
    _check_validation_use(checked)


def split_shares(text: str) -> tuple[float, float, float]:
    """The shares of ``data.split`` for training, validation and test, as written, not normalised.

    Raises:
        ValueError: not one to three finite numbers from 0 on of which the first is above 0.
    """
    shares = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    if not 1 <= len(shares) <= 3 or not all(map(math.isfinite, shares)) or min(shares) < 0 or shares[0] <= 0:
        raise ValueError(text)
    return (*shares, *[0.0] * (3 - len(shares)))  # type: ignore[return-value]


def probabilities(text: str) -> tuple[float, ...]:
    """The shares of ``data.interleave_probs``, scaled to a sum of 1.

    Raises:
        ValueError: not a comma list of finite numbers above 0.
    """
    shares = [float(part) for part in text.split(",")]
    if not all(map(math.isfinite, shares)) or min(shares) <= 0:
        raise ValueError(text)
    return tuple(share / sum(shares) for share in shares)


def _check_stage(checked: Checked) -> None:
    pair = ("training.stage", "data.data_manager_type")
    if tuple(checked.value(path) for path in pair) == ("pt", "lf"):
        checked.fault(
            pair,
            "training.stage pt reads a token stream and data.data_manager_type lf conversations; set "
            "data.data_manager_type: mg, which takes raw text files and Megatron's .bin/.idx alike",
        )


def _check_masks(checked: Checked) -> None:
    data = checked.config.data
    if data.train_on_prompt and data.mask_history:
        checked.fault(
            ("data.train_on_prompt", "data.mask_history"),
            "data.train_on_prompt and data.mask_history exclude each other; keep one",
        )
    if data.train_on_prompt and data.template == "gpt":
        checked.fault(
            ("data.train_on_prompt", "data.template"),
            "data.train_on_prompt and data.template gpt exclude each other: its one end token closes the "
            "whole conversation; keep one",
        )
    if data.reset_attention_mask and not data.append_eod:
        checked.fault(
            ("data.reset_attention_mask", "data.append_eod"),
            "data.reset_attention_mask needs data.append_eod: true, which marks where a document ends",
        )
    if data.create_attention_mask_in_dataloader:
        checked.fault(
            ("data.create_attention_mask_in_dataloader",),
            "is not supported and will not be: a mask matrix of cutoff_len x cutoff_len is what the "
            "reference "
            "makes and hands on inverted; here attention is told where documents end. Leave it out, and "
            "set data.reset_attention_mask: true if documents must not see each other",
        )
    if data.no_shared_storage and data.data_shared_file_system:
        checked.fault(
            ("data.no_shared_storage", "data.data_shared_file_system"),
            "data.no_shared_storage and data.data_shared_file_system say the opposite of each other; keep "
            "one",
        )
    if data.dataset is None:
        checked.warn("data.dataset", "not set; training needs it")


def _check_mixing(checked: Checked) -> None:
    data = checked.config.data
    if data.interleave_probs is not None:
        if data.mix_strategy == "concat":
            checked.fault(
                ("data.interleave_probs", "data.mix_strategy"),
                "data.interleave_probs needs data.mix_strategy interleave_under or interleave_over; concat "
                "uses "
                "every sample once",
            )
        try:
            shares = probabilities(data.interleave_probs)
        except ValueError:
            checked.fault(
                ("data.interleave_probs",),
                f"{data.interleave_probs!r} is not a comma list of numbers above 0, such as 0.7,0.3",
            )
            return
        count = _count_of(data)
        if count is not None and count != len(shares):
            checked.fault(
                ("data.interleave_probs", "data.dataset"),
                f"data.interleave_probs gives {len(shares)} shares for the {count} data sets of "
                "data.dataset; give one for each",
            )
    if data.mix_strategy != "concat" and _count_of(data) == 1:
        checked.warn("data.mix_strategy", "has no effect with one data set")


def _count_of(data: DataConfig) -> int | None:
    """How many data sets are named; None if there are none, or if only their files can tell."""
    dataset: Any = data.dataset
    if isinstance(dataset, Mapping) and data.data_manager_type == "mg":
        named = dataset.get("file_name")
        if isinstance(named, list | tuple) or (isinstance(named, str) and "," in named):
            return None
    if dataset is None:
        return None
    return len(dataset) if isinstance(dataset, tuple) else 1


def _check_packing(checked: Checked) -> None:
    data = checked.config.data
    packs = data.packing or data.neat_packing
    key = "data.neat_packing" if data.neat_packing else "data.packing"
    if packs and data.data_manager_type == "mg":
        checked.warn(key, "has no effect with data.data_manager_type mg: its samples are full already")
    if data.cross_document_attention and data.neat_packing:
        checked.fault(
            ("data.cross_document_attention", "data.neat_packing"),
            "data.neat_packing means that packed samples do not see each other, "
            "data.cross_document_attention "
            "that they do; keep one",
        )
    elif data.cross_document_attention and (data.data_manager_type == "mg" or not packs):
        reason = "data.packing is false"
        if checked.config.training.stage == "pt":
            reason = "documents of a pretraining window see each other unless data.reset_attention_mask"
        elif data.data_manager_type == "mg":
            reason = "samples of packed .bin/.idx files never see each other"
        checked.warn("data.cross_document_attention", f"has no effect: {reason}")


def _check_streaming(checked: Checked) -> None:
    data, training = checked.config.data, checked.config.training
    if not data.streaming:
        return
    if training.max_steps <= 0:
        checked.fault(
            ("data.streaming", "training.max_steps"),
            "data.streaming reads data of unknown length, so training.max_steps must say how many updates to "
            "make",
        )
    if data.val_size:
        checked.fault(
            ("data.val_size", "data.streaming"),
            "data.val_size cannot be cut from a stream of unknown length (data.streaming); give "
            "data.eval_dataset",
        )
    if checked.changed("data.split") and training.stage == "pt" and _holds_out(data.split):
        checked.fault(
            ("data.split", "data.streaming"),
            "data.split cannot be cut from a stream of unknown length (data.streaming), which would train "
            "on every document; give data.eval_dataset",
        )
    refused = {
        "data.index_compat": "Megatron's index needs the whole data set",
        "data.tokenized_path": "a stream's tokens are not kept",
        "data.max_samples": "a stream is not counted; shorten the files, or training.max_steps",
    }
    for path, reason in refused.items():
        if checked.changed(path):
            checked.fault((path, "data.streaming"), f"{path} does not go with data.streaming: {reason}")
    if training.stage == "sft" and data.data_manager_type == "mg":
        checked.fault(
            ("data.streaming", "data.data_manager_type"),
            "data.streaming does not go with packed .bin/.idx files (data.data_manager_type mg), which are "
            "mapped into memory as they are; set it to false",
        )
    if training.dataloader_drop_last:
        checked.warn("training.dataloader_drop_last", "has no effect while data.streaming is true")


def _check_megatron(checked: Checked) -> None:
    data, training = checked.config.data, checked.config.training
    try:
        split_shares(data.split)
    except ValueError:
        checked.fault(
            ("data.split",),
            f"{data.split!r} is not one to three shares for training, validation and test, such as 98,2,0",
        )
    if data.index_compat is None:
        return
    if data.data_manager_type != "mg" or training.stage != "pt":
        checked.fault(
            ("data.index_compat", "data.data_manager_type"),
            "data.index_compat is for pretraining: set training.stage: pt and data.data_manager_type: mg",
        )
    if training.disable_shuffling:
        checked.fault(
            ("data.index_compat", "training.disable_shuffling"),
            "data.index_compat megatron shuffles as megatron-core does; set training.disable_shuffling to "
            "false",
        )
    if data.mix_strategy != "concat":
        checked.fault(
            ("data.index_compat", "data.mix_strategy"),
            "data.index_compat megatron mixes by the weights in data.dataset, not by data.mix_strategy; "
            "leave data.mix_strategy out",
        )


def _check_validation_data(checked: Checked) -> None:
    data = checked.config.data
    size = data.val_size
    if isinstance(size, float) and (size == 1 or (size > 1 and not size.is_integer())):
        checked.fault(
            ("data.val_size",),
            f"{size} is neither a share (below 1) nor a number of samples; write 0.1 for a tenth, or 1 for "
            "one "
            "sample",
        )
    given = [path for path in _VALIDATION if _gives_validation(checked, path)]
    if len(given) > 1:
        checked.fault(
            (given[0], given[1]),
            f"{' and '.join(given)} each name the validation data; keep one",
        )
    if data.val_size and data.data_manager_type == "mg":
        other = "a share of the documents, data.split: 98,2,0"
        if checked.config.training.stage == "sft":
            other = "other packed files, data.eval_dataset"
        checked.fault(
            ("data.val_size", "data.data_manager_type"),
            f"data.val_size is for conversations; with data.data_manager_type mg give {other}",
        )
    if data.eval_on_each_dataset and not _gives_validation(checked, "data.eval_dataset"):
        checked.warn("data.eval_on_each_dataset", "has no effect without data.eval_dataset")


def _holds_out(split: str) -> bool:
    """Whether ``data.split`` keeps documents from training; a faulty one is told of elsewhere."""
    try:
        return any(split_shares(split)[1:])
    except ValueError:
        return False


def _gives_validation(checked: Checked, path: str) -> bool:
    value = checked.value(path)
    if path != "data.split":
        return bool(value)
    try:
        return checked.config.training.stage == "pt" and split_shares(str(value))[1] > 0
    except ValueError:
        return False


def has_validation(checked: Checked) -> bool:
    """Whether the run has data to validate on."""
    return any(_gives_validation(checked, path) for path in _VALIDATION)


def _check_validation_use(checked: Checked) -> None:
    training = checked.config.training
    validates = has_validation(checked)
    needs = {
        "training.early_stopping_patience": training.early_stopping_patience is not None,
        "training.keep_best_checkpoint": training.keep_best_checkpoint,
        "training.load_best_model_at_end": training.load_best_model_at_end,
    }
    for path, is_set in needs.items():
        if is_set and not validates:
            checked.fault(
                (path, "data.eval_dataset"),
                f"{path} needs validation data; give data.eval_dataset, data.val_size or, for mg, "
                "data.split: 98,2,0",
            )
    for name in ("eval_steps", "eval_on_start", "per_device_eval_batch_size"):
        if checked.changed(f"training.{name}") and not validates:
            checked.warn(
                f"training.{name}",
                "has no effect without data.eval_dataset, data.val_size or a share in data.split",
            )
    if training.load_best_model_at_end and not training.keep_best_checkpoint:
        checked.fault(
            ("training.load_best_model_at_end", "training.keep_best_checkpoint"),
            "training.load_best_model_at_end needs training.keep_best_checkpoint: true, which keeps the best "
            "weights",
        )
    if (
        training.early_stopping_min_delta
        and training.early_stopping_patience is None
        and not training.keep_best_checkpoint
    ):
        checked.warn(
            "training.early_stopping_min_delta", "has no effect without training.early_stopping_patience"
        )


_LF_ONLY = ("train_on_prompt", "mask_history", "tool_format", "default_system", "enable_thinking")
_PT_ONLY = ("append_eod", "reset_attention_mask")


def without_effect(stage: str, manager: str) -> Mapping[str, tuple[str, ...]]:
    """Reason -> settings of ``data`` that do nothing in a run of this stage and data manager."""
    told: dict[str, tuple[str, ...]] = {}
    if stage == "pt":
        told["training.stage is pt"] = tuple(f"data.{key}" for key in _LF_ONLY)
    elif manager == "mg":
        told["the samples are packed .bin/.idx files"] = tuple(
            f"data.{key}" for key in (*_LF_ONLY, *_PT_ONLY, "template", "split")
        )
    else:
        told["training.stage is sft"] = tuple(f"data.{key}" for key in _PT_ONLY)
        told["data.data_manager_type is lf"] = ("data.split",)
    return told
