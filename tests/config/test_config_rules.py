"""Settings together: exclusions, no effect, later features, defaults that follow other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import REQUIRED, fault_of, load

from shardyard.config import load_config
from shardyard.config.later import LATER
from shardyard.config.schema import FIELDS, get
from shardyard.config.values import kind_of


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("data: {train_on_prompt: true, mask_history: true}", ["data.train_on_prompt", "data.mask_history"]),
        (
            "training: {stage: pt}\ndata: {data_manager_type: mg, reset_attention_mask: true}",
            ["data.reset_attention_mask", "data.append_eod"],
        ),
        ("training: {stage: pt}", ["training.stage", "data.data_manager_type"]),
        (
            "training: {warmup_steps: 5, warmup_ratio: 0.1}",
            ["training.warmup_steps", "training.warmup_ratio"],
        ),
        ("training: {min_lr: 1e-3}", ["training.min_lr", "training.lr"]),
        (
            "training: {overwrite_output_dir: true, resume_from_checkpoint: latest}",
            ["training.overwrite_output_dir", "training.resume_from_checkpoint"],
        ),
        (
            "training: {overwrite_output_dir: true, resume_from_checkpoint: out/checkpoints/global_step_5}",
            ["training.overwrite_output_dir", "training.resume_from_checkpoint"],
        ),
        (
            "optimization: {use_flash_gdn: true, use_triton_gdn: true}",
            ["optimization.use_flash_gdn", "optimization.use_triton_gdn"],
        ),
    ],
)
def test_pairs_that_exclude_each_other_are_refused_with_both_names(
    tmp_path: Path, text: str, keys: list[str]
) -> None:
    fault = fault_of(tmp_path, text)
    assert "\n" not in fault
    assert all(key in fault for key in keys)


@pytest.mark.parametrize(
    "text",
    [
        "training: {stage: pt}\ndata: {data_manager_type: mg, reset_attention_mask: true, append_eod: true}",
        "training: {warmup_steps: 5, warmup_ratio: 0.0}",
        "training: {min_lr: 1e-5}",
        "training: {min_lr: 1e-3, lr_scheduler_type: constant}",
        "training: {overwrite_output_dir: true, resume_from_checkpoint: other/global_step_5}",
        "training: {overwrite_output_dir: true, resume_from_checkpoint: outside/global_step_5}",
        "data: {train_on_prompt: true, tool_format: qwen}",
        "model: {model_id: glm52}\noptimization: {use_sparse_flash_attn: true}",
    ],
)
def test_near_misses_of_those_pairs_load(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


@pytest.mark.parametrize(
    "setting",
    [
        "warmup_ratio: 1.0", "warmup_ratio: -0.1", "adam_beta1: 1", "adam_beta2: -0.1", "adam_epsilon: 0",
        "lr: -1",
        "max_steps: 0", "max_steps: -2", "num_train_epochs: 0", "num_train_epochs: -1", "max_grad_norm: -1",
        "per_device_train_batch_size: 0", "gradient_accumulation_steps: 0", "logging_steps: 0",
        "save_epochs: -1",
        "dataloader_num_workers: -1", "dataloader_prefetch_factor: 0", "seed: -1", "warmup_steps: -1",
        "weight_decay: -0.1", "min_lr: -1",
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(tmp_path: Path, setting: str) -> None:
    fault = fault_of(tmp_path, f"training:\n  {setting}\n")
    assert fault.startswith(
        f"run.yaml:2:{len(setting.split(':')[0]) + 5}  training.{setting.split(':')[0]}: "
    )


def test_all_rules_speak_at_once(tmp_path: Path) -> None:
    text = "training:\n  max_steps: 0\n  seed: x\n  mtp_loss_scaling_factor: 0.5\ndata:\n  val_size: 1.0\n"
    assert fault_of(tmp_path, text).split("\n  ")[1:] == [
        "run.yaml:2:14  training.max_steps: 0 would train nothing; "
        "give a number of updates, or -1 for epochs",
        "run.yaml:3:9  training.seed: 'x' is not a whole number",
        "run.yaml:4:28  training.mtp_loss_scaling_factor: 0.5 asks for multi-token prediction "
        "which comes with a later release; use its default, 0.3",
        "run.yaml:6:13  data.val_size: 1.0 is neither a share (below 1) nor a number of samples; "
        "write 0.1 for a tenth, or 1 for one sample",
    ]


OTHER_VALUES = {
    "model.init_special_tokens": "desc_init", "model.quant_recipe_name": "mxfp8",
    "model.fsdp_low_precision_all_gather_mode": "all",
    "model.enable_fsdp_low_precision_all_gather": "false",
}  # fmt: skip


@pytest.mark.parametrize("path", LATER)
def test_later_settings_load_at_their_default_and_are_refused_elsewhere(path: str) -> None:
    kind = kind_of(FIELDS[path])
    if LATER[path].refused:
        others = [str(value) for value in LATER[path].refused]
    elif path in OTHER_VALUES:
        others = [OTHER_VALUES[path]]
    else:
        others = ["true" if bool in kind.scalars else "7" if kind.scalars & {int, float} else "abc"]
    for other in others:
        with pytest.raises(Exception, match=rf"{path}: .* asks for .*later release"):
            load_config([*REQUIRED, f"--{path}", other])
    assert get(load_config(REQUIRED).config, path) == FIELDS[path].get_default()


def _warnings(tmp_path: Path, text: str) -> list[str]:
    return [w.split("  ")[-1] for w in load(tmp_path, text, "--data.dataset", "x").warnings]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "parallel: {recompute_modules: [a]}",
            "parallel.recompute_modules: has no effect while parallel.recompute",
        ),
        (
            "training: {dataloader_prefetch_factor: 2}",
            "training.dataloader_prefetch_factor: has no effect while",
        ),
        (
            "training: {profile_level: level1}",
            "training.profile_level: has no effect while training.profile is",
        ),
        (
            "parallel: {ep_dispatcher: mc2}",
            "parallel.ep_dispatcher: has no effect while parallel.ep_size is 1",
        ),
        ("data: {append_eod: true}", "data.append_eod: has no effect while training.stage is sft"),
        (
            "data: {data_manager_type: mg, mask_history: true}\ntraining: {stage: pt}",
            "data.mask_history: has no effect while training.stage is pt",
        ),
        (
            "data: {data_manager_type: mg}\ntraining: {stage: pt, calculate_per_token_loss: false}",
            "training.calculate_per_token_loss: false has no effect: the loss is a mean over the global",
        ),
        (
            "data: {ignore_pad_token_for_loss: false}",
            "data.ignore_pad_token_for_loss: false has no effect: batches hold no padding",
        ),
    ],
)
def test_settings_without_effect_warn_once(tmp_path: Path, text: str, warning: str) -> None:
    (found,) = _warnings(tmp_path, text)
    assert found.startswith(warning)


def test_module_lists_at_their_defaults_say_nothing(tmp_path: Path) -> None:
    text = (
        """
parallel:
  ep_size: 1
  ep_modules: [model.layers.{*}.mlp.experts]
  ep_fsdp_modules: [model.layers.{*}.mlp.experts]
  ep_dispatcher: eager
  cp_type: ulysses
  recompute: false
  recompute_modules: [model.layers.{*}]
""".replace("[model", '["model')
        .replace("experts]", 'experts"]')
        .replace("{*}]", '{*}"]')
    )
    assert _warnings(tmp_path, text) == []


def test_min_lr_follows_a_small_lr_with_a_warning(tmp_path: Path) -> None:
    loaded = load(tmp_path, "training: {lr: 1e-7}", "data.dataset=x")
    assert loaded.config.training.min_lr == 1e-7
    assert str(loaded.origins["training.min_lr"]) == "follows training.lr"
    assert loaded.warnings == [
        "training.min_lr: the default 1e-06 is above training.lr 1e-07; training.lr is used"
    ]


def test_warmup_steps_turn_the_default_ratio_off(tmp_path: Path) -> None:
    loaded = load(tmp_path, "training: {warmup_steps: 5}")
    assert (loaded.config.training.warmup_steps, loaded.config.training.warmup_ratio) == (5, 0.0)
    assert str(loaded.origins["training.warmup_ratio"]) == "follows training.warmup_steps"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (
            "{warmup_steps: 100, max_steps: 3}",
            "100 with training.max_steps 3: the rate only reaches 3/100 of training.lr",
        ),
        (
            "{warmup_steps: 3, max_steps: 3}",
            "3 with training.max_steps 3: the rate reaches training.lr in the last update only",
        ),
    ],
)
def test_a_warmup_as_long_as_the_run_warns(tmp_path: Path, text: str, outcome: str) -> None:
    warning = f"training.warmup_steps: {outcome}; lower warmup_steps"
    assert _warnings(tmp_path, f"training: {text}") == [warning]


@pytest.mark.parametrize(
    "text",
    [
        "{warmup_steps: 2, max_steps: 3}",
        "{warmup_steps: 0, max_steps: 3}",
        "{warmup_steps: 100}",
        "{max_steps: 3}",
    ],
)
def test_a_warmup_that_ends_before_the_run_says_nothing(tmp_path: Path, text: str) -> None:
    assert _warnings(tmp_path, f"training: {text}") == []


@pytest.mark.parametrize("key", ["use_sparse_flash_attn", "use_ascend_mhc", "use_triton_swiglu_limit"])
def test_family_operators_are_refused_for_other_families(tmp_path: Path, key: str) -> None:
    fault = fault_of(tmp_path, f"model: {{model_id: qwen3}}\noptimization: {{{key}: true}}")
    assert f"optimization.{key}: is for model.model_id" in fault
    load(tmp_path, f"model: {{model_id: deepseek_v4}}\noptimization: {{{key}: true}}")
    load(tmp_path, f"model: {{model_id: qwen3}}\noptimization: {{{key}: false}}")
