"""From a key that does not exist to the one that was meant, wherever in the tree it stands."""

from __future__ import annotations

from difflib import get_close_matches

from shardyard.config.schema import FIELDS, SECTIONS

_OTHER_NAMES = {
    "learning_rate": "training.lr",
    "learningrate": "training.lr",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "max_seq_len": "data.cutoff_len",
    "max_seq_length": "data.cutoff_len",
    "max_length": "data.cutoff_len",
    "seq_length": "data.cutoff_len",
    "seq_len": "data.cutoff_len",
    "batch_size": "training.per_device_train_batch_size",
    "micro_batch_size": "training.per_device_train_batch_size",
    "train_iters": "training.max_steps",
    "save_interval": "training.save_steps",
    "log_interval": "training.logging_steps",
    "lr_warmup_fraction": "training.warmup_ratio",
    "lr_decay_style": "training.lr_scheduler_type",
    "lr_scheduler": "training.lr_scheduler_type",
    "lr_wsd_decay_iters": "training.lr_wsd_decay_ratio",
    "optim": "training.optimizer",
    "use_muon": "training.optimizer",
    "use_adam_mini": "training.optimizer",
    "clip_grad": "training.max_grad_norm",
    "gradient_checkpointing": "parallel.recompute",
    "activation_checkpointing": "parallel.recompute",
    "model_path": "model.model_name_or_path",
    "model_name": "model.model_name_or_path",
    "tokenizer_path": "model.tokenizer_name_or_path",
    "data_path": "data.dataset",
    "flash_attn": "optimization.use_flash_attn",
    "resume": "training.resume_from_checkpoint",
    "bf16": "parallel.param_dtype",
    "fp16": "parallel.param_dtype",
    "mixed_precision": "parallel.param_dtype",
    "torch_compile": "optimization.compile",
    "use_liger_kernel": "optimization.use_fused_rmsnorm",
    "sequence_len": "data.cutoff_len",
    "sample_packing": "data.packing",
}
"""Names of the same thing in neighbouring systems."""

_NO_ADAPTERS = "all weights are trained, but for those of model.freeze: leave it out"
_NOT_HERE = {
    **dict.fromkeys(
        ("finetuning_type", "adapter", "lora", "lora_rank", "lora_alpha", "lora_target"), _NO_ADAPTERS
    ),
    "report_to": "the log and metrics.jsonl in training.output_dir are what is written: leave it out",
    "deepspeed": "FSDP2 shards the model over the ranks (parallel.fsdp_size): leave it out",
}
"""What neighbouring systems have and this one does not, and what there is instead."""

_BY_KEY = {path.split(".")[1]: path for path in FIELDS}


def suggest(path: str) -> str:
    """``; did you mean parallel.recompute?`` for an unknown ``path``, or an empty text if nothing is near."""
    section, _, key = path.strip("-: ").rpartition(".")
    key = key.lower().replace("-", "_")
    if key in _NOT_HERE:
        return f"; {_NOT_HERE[key]}"
    near_section = (
        section if section in SECTIONS else (get_close_matches(section, SECTIONS, 1, 0.7) or [""])[0]
    )
    own = (
        {name: f"{near_section}.{name}" for name in SECTIONS[near_section].model_fields}
        if near_section
        else {}
    )
    for names, cutoff in (
        (own, 1.0),
        (_BY_KEY, 1.0),
        (_OTHER_NAMES, 1.0),
        (own, 0.75),
        (_BY_KEY, 0.75),
        (own, 0.6),
    ):
        found = get_close_matches(key, names, 1, cutoff)
        if found:
            return f"; did you mean {names[found[0]]}?"
    return ""


def suggest_section(name: str) -> str:
    """The same for an unknown word at the top level, which may be a misspelt section or a key without one."""
    near = get_close_matches(name.lower(), SECTIONS, 1, 0.7)
    return f"; did you mean {near[0]}?" if near else suggest(name)


MOVED = {
    "use_fused_rmsnorm": "optimization.use_fused_rmsnorm",
    "use_fused_rotary_pos_emb": "optimization.use_fused_rotary_pos_emb",
    "moe_grouped_gemm": "optimization.moe_grouped_gemm",
    "use_flash_attn": "optimization.use_flash_attn",
    "indexer_loss_coeff": "training.indexer_loss_coeff",
}
"""Keys that the reference's files have in other sections, which are accepted there with a warning."""
