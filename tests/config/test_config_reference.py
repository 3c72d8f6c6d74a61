"""The shapes of the reference's files and command lines load, or are refused for one named reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard.config import Loaded, load_config
from shardyard.errors import UserError

PRETRAIN = """
model:
  model_id: qwen3
  tokenizer_name_or_path: None
  trust_remote_code: true
  train_from_scratch: false
  init_model_with_meta_device: true
data:
  template: qwen3
  cutoff_len: 4096
  data_manager_type: mg
  max_samples: 100000
  overwrite_cache: true
  packing: false
  preprocessing_num_workers: 1
parallel:
  fsdp_modules:
    - model.layers.{*}
    - model.embed_tokens
    - lm_head
  ignored_modules:
    - model.layers.{*}.mlp.router
  ep_modules:
    - model.layers.{*}.mlp.experts
  ep_fsdp_modules:
    - model.layers.{*}.mlp.experts
  ep_dispatcher: eager
  cp_size: 1
  cp_type: ulysses
  fsdp_implementation: custom
  num_to_forward_prefetch: 2
  reduce_dtype: bf16
  recompute: true
  recompute_modules:
    - model.layers.{*}
training:
  stage: pt
  lr: 1e-05
  min_lr: 1e-06
  adam_epsilon: 1e-08
  adam_beta2: 0.95
  weight_decay: 0.01
  warmup_ratio: 0.0
  max_steps: 2000
  num_train_epochs: 3.0
  save_steps: 10000
  save_total_limit: 1
  disable_shuffling: 1
  dataloader_num_workers: 4
  dataloader_drop_last: true
  optimizer: adamw
  deterministic: false
  log_throughput: true
"""

TUNE = """
model:
  trust_remote_code: true
data:
  dataset:
    file_name: train-00000-of-00001.parquet
  template: qwen3
  cutoff_len: 4096
  max_samples: 100000
  overwrite_cache: true
  preprocessing_num_workers: 1
parallel:
  recompute: false
  recompute_modules: ["model.layers.{*}"]
training:
  stage: sft
  lr: 1e-05
  max_steps: -1
  num_train_epochs: 1000
  optimizer: fused_adamw
  use_fused_rmsnorm: true
  use_fused_rotary_pos_emb: true
  moe_grouped_gemm: true
  use_flash_attn: true
optimization:
  indexer_loss_coeff: 1.0
"""

SCRIPT = (
    "--model.model_name_or_path", "./hf/Qwen3-8B",
    "--parallel.fsdp_size", "8", "--parallel.ep_size", "1", "--parallel.ep_fsdp_size", "1",
    "--training.per_device_train_batch_size", "1", "--training.gradient_accumulation_steps", "4",
    "--training.output_dir", "./output",
    "--optimization.use_fused_rmsnorm", "True", "--optimization.use_flash_attn", "True",
    "--optimization.chunk_loss_size", "1024", "--parallel.reshard_after_forward", "False",
)  # fmt: skip


def _load(folder: Path, text: str, *words: str) -> Loaded:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config([str(path), *SCRIPT, *words])


def test_the_pretraining_shape_loads_with_its_values(tmp_path: Path) -> None:
    dataset = '{"file_name": "./data/train-00000-of-00001.parquet"}'
    config = _load(tmp_path, PRETRAIN, "--data.dataset", dataset).config
    assert config.model.tokenizer_name_or_path is None
    assert config.model.model_id == "qwen3"
    assert (config.data.dataset, config.data.max_samples) == (
        {"file_name": "./data/train-00000-of-00001.parquet"},
        100000,
    )
    assert (config.training.lr, config.training.min_lr, config.training.adam_epsilon) == (1e-5, 1e-6, 1e-8)
    assert config.training.disable_shuffling is True
    assert (config.parallel.fsdp_size, config.parallel.reduce_dtype) == (8, "bf16")
    assert config.parallel.fsdp_modules == ("model.layers.{*}", "model.embed_tokens", "lm_head")
    assert config.parallel.reshard_after_forward is False
    assert config.optimization.use_flash_attn is True


def test_the_pretraining_shape_warns_only_of_what_differs(tmp_path: Path) -> None:
    warned = {w.split("  ")[-1].split(":")[0] for w in _load(tmp_path, PRETRAIN, "data.dataset=x").warnings}
    assert warned == {"model.tokenizer_name_or_path"}


def test_the_tuning_shape_loads_with_old_switches_under_training(tmp_path: Path) -> None:
    loaded = _load(tmp_path, TUNE, "--data.dataset", "alpaca_full")
    assert loaded.config.data.dataset == "alpaca_full"
    assert loaded.config.training.num_train_epochs == 1000.0
    assert loaded.config.optimization.moe_grouped_gemm is True
    assert loaded.config.training.indexer_loss_coeff == 1.0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model.quant_recipe_name", "mxfp8"], "low-precision"),
        (["--model.quant_converters", "quantize.linear.mx", "quantize.moe.mx"], "low-precision"),
    ],
)
def test_what_comes_later_is_refused_with_its_name(tmp_path: Path, words: list[str], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        _load(tmp_path, TUNE, *words)
    message = str(caught.value)
    assert message.startswith(f"command line  {words[0][2:]}: ")
    assert reason in message and "later release" in message


def test_the_bare_gather_flag_is_its_default(tmp_path: Path) -> None:
    loaded = _load(tmp_path, TUNE, "--model.enable_fsdp_low_precision_all_gather")
    assert loaded.config.model.enable_fsdp_low_precision_all_gather is True


REFERENCE_DEFAULTS = {
    "model.model_revision": "main", "model.use_fast_tokenizer": True,
    "model.init_special_tokens": "noise_init",
    "data.dataset_dir": "./configs/fsdp2/data", "data.cutoff_len": 2048, "data.buffer_size": 16384,
    "data.preprocessing_batch_size": 1000, "data.ignore_pad_token_for_loss": True,
    "data.enable_thinking": True,
    "data.data_manager_type": "lf", "data.split": "100,0,0", "data.val_size": 0.0,
    "parallel.tp_size": 1, "parallel.ep_size": 1, "parallel.cp_size": 1, "parallel.cp_type": "ulysses",
    "parallel.recompute": False, "parallel.reshard_after_forward": True, "parallel.reduce_dtype": "fp32",
    "parallel.fsdp_implementation": "native",
    "parallel.num_to_forward_prefetch": 1, "parallel.chunk_mbs": 1, "parallel.chunk_mbs_arg_indexs": (0,),
    "training.deterministic": True, "training.optimizer": "adamw", "training.lr": 1e-5,
    "training.weight_decay": 0.01, "training.adam_beta1": 0.9, "training.adam_beta2": 0.95,
    "training.adam_epsilon": 1e-8, "training.max_grad_norm": 1.0, "training.lr_scheduler_type": "cosine",
    "training.warmup_ratio": 0.03, "training.min_lr": 1e-6, "training.num_train_epochs": 3.0,
    "training.max_steps": -1, "training.gradient_accumulation_steps": 1, "training.seed": 42,
    "training.stage": "sft", "training.save_steps": 500, "training.save_epochs": 1,
    "training.save_total_limit": 3, "training.save_hf_weights": True, "training.logging_steps": 1,
    "training.dataloader_num_workers": 0, "training.dataloader_pin_memory": True,
    "training.per_device_train_batch_size": 8, "training.profile_ranks": (-1,),
    "training.mtp_loss_scaling_factor": 0.3, "training.indexer_loss_coeff": 1.0,
    "optimization.pre_tokens": 1048576, "optimization.gdn_chunk_size": 64, "inference.max_new_tokens": 512,
}  # fmt: skip


OWN_DEFAULTS = {
    # The reference's shard_by_dim_1 is read by none of its running code; auto wastes least.
    "parallel.efsdp_shard_placement_fn": "auto",
}


def test_defaults_that_depart_from_the_references() -> None:
    config = load_config(["model.model_name_or_path=x", "training.output_dir=y"]).config
    assert {path: config.parallel.model_dump()[path.split(".")[1]] for path in OWN_DEFAULTS} == OWN_DEFAULTS


@pytest.mark.parametrize(
    "words",
    [
        ["--parallel.ep_size", "8"],
        ["--parallel.cp_size", "32"],
        ["--parallel.tp_size", "2"],
        ["--training.router_aux_loss_coef", "0.001"],
        ["--parallel.efsdp_shard_placement_fn", "shard_by_dim_1"],
    ],
)
def test_parallel_settings_of_the_references_command_lines_load(tmp_path: Path, words: list[str]) -> None:
    loaded = _load(tmp_path, TUNE, *words)
    section, key = words[0][2:].split(".")
    assert str(getattr(getattr(loaded.config, section), key)) == words[1]


def test_defaults_are_the_references() -> None:
    config = load_config(["model.model_name_or_path=x", "training.output_dir=y"]).config
    for path, value in REFERENCE_DEFAULTS.items():
        section, key = path.split(".")
        found = getattr(getattr(config, section), key)
        assert (found, type(found)) == (value, type(value)), path
