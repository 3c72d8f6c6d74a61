"""The YAML file: structure, faults with their lines, suggestions, references."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.configs import REQUIRED, fault_of, load

from shardyard.config import ConfigError, load_config
from shardyard.errors import UserError

TRICKY = st.text(alphabet="abc:-[]{}&*!|>'\"#%@`~<,? \n\t0.$é", max_size=40)


def test_all_faults_are_shown_at_once_in_reading_order(tmp_path: Path) -> None:
    text = """\
model:
  cutoff_len: 8
trainng: {lr: 5.0e-5}
training:
  lr: abc
  num_epochs: 3
  save_steps: 5
  save_steps: 6
parallel:
  recompte: true
  fsdp_size: 0
"""
    assert fault_of(tmp_path, text, "--parallel.fsdp_siz", "3").split("\n  ") == [
        "8 faults in the configuration:",
        "run.yaml:2:3  model.cutoff_len: unknown key; did you mean data.cutoff_len?",
        "run.yaml:3:1  trainng: unknown section; did you mean training?",
        "run.yaml:5:7  training.lr: 'abc' is not a number",
        "run.yaml:6:3  training.num_epochs: unknown key; did you mean training.num_train_epochs?",
        "run.yaml:8:3  training.save_steps: written twice, first in line 7; keep one",
        "run.yaml:10:3  parallel.recompte: unknown key; did you mean parallel.recompute?",
        "run.yaml:11:14  parallel.fsdp_size: 0 is out of range; it must be at least 1",
        "command line  parallel.fsdp_siz: unknown key; did you mean parallel.fsdp_size?",
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("model: {learning_rate: 5.0e-5}", "training.lr"),
        ("training: {recompute: true}", "parallel.recompute"),
        ("lr: 1", "training.lr"),
        ("data: {Cutoff-Len: 1}", "data.cutoff_len"),
        ("training: {gradient_checkpointing: true}", "parallel.recompute"),
        ("paralel: {tp_size: 1}", "parallel"),
        ("training: {save_s: 7}", "training.save_steps"),
    ],
)
def test_the_key_that_was_meant_is_suggested_from_the_whole_tree(
    tmp_path: Path, text: str, meant: str
) -> None:
    assert f"did you mean {meant}?" in fault_of(tmp_path, text)


def test_a_dotted_key_at_the_top_is_explained(tmp_path: Path) -> None:
    assert "write `lr` under `training:`" in fault_of(tmp_path, "training.lr: 1e-4")


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "training:\n", "training: ~\nmodel: null\n", "---\n"]
)
def test_empty_files_and_sections_are_defaults(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text).config == load_config(REQUIRED).config


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- a\n", "run.yaml:1:1  the file must be a mapping of sections"),
        ("just words\n", "run.yaml:1:1  the file must be a mapping of sections"),
        ("training: 5\n", "run.yaml:1:1  training: a section must be a mapping"),
        ("training: [lr]\n", "run.yaml:1:1  training: a section must be a mapping"),
        ("model:\n---\ndata:\n", "run.yaml:3:1  a second YAML document begins here"),
        ("training:\n\tlr: 1\n", "run.yaml:2:1  a tab cannot indent YAML; use spaces"),
        ("training:\n  lr: 1\n bad\n", "run.yaml:3:"),
        ("training: {lr: [1\n", "run.yaml:2:1  not YAML"),
        ("data: {dataset: *.json}\n", "(a value that begins with * or & needs quotes)"),
        ("parallel: {fsdp_modules: [model.layers.{*}]}\n", "text with braces needs quotes"),
        ("training: {lr: !!python/object:os.system 1}\n", "training.lr: tag tag:yaml.org,2002:python/object"),
        ("training: {lr: !env LR}\n", "run.yaml:1:16  training.lr: tag !env is not supported"),
        ("training: {? [a] : 1}\n", "run.yaml:1:14  training: a key must be a word"),
        ("a: &a\n  b: *a\n", "an anchor (&name) contains itself"),
        ("training: {lr: 1, lr: 2}\ntraining: {}\n", "training: written twice, first in line 1"),
    ],
)
def test_malformed_files_get_one_clear_message(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in fault_of(tmp_path, text)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufefftraining: {seed: 7}").config.training.seed == 7


def test_text_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"model:\n  model_name_or_path: caf\xe9\n")
    with pytest.raises(UserError, match=r"run.yaml:2  not UTF-8 text"):
        load_config([str(tmp_path / "run.yaml")])


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope.yaml: no such file"):
        load_config([str(tmp_path / "nope.yaml")])
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match=r"folder.yaml: cannot be read"):
        load_config([str(tmp_path / "folder.yaml")])


@pytest.mark.parametrize("depth", [200, 2000, 200_000])
def test_deep_nesting_is_refused(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    assert "run.yaml" in fault_of(tmp_path, f"data: {{dataset: {nested}}}")
    assert "model.config_overrides" in fault_of(tmp_path, "", 'model.config_overrides={"a": ' + nested + "}")


def test_many_aliases_cannot_exhaust_memory(tmp_path: Path) -> None:
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "after expanding aliases" in fault_of(tmp_path, "\n".join(lines))


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = """
training: &base {lr: 1e-4, seed: 3}
data:
  dataset:
    <<: [{file_name: a.json, split: x}, {split: y, columns: {prompt: q}}]
    file_name: b.json
"""
    loaded = load(tmp_path, text)
    assert loaded.config.training.lr == 1e-4
    assert loaded.config.data.dataset == {"file_name": "b.json", "split": "x", "columns": {"prompt": "q"}}
    merged = load(tmp_path, "training: {<<: &b {seed: 5, lr: 2e-4}, lr: 1e-4}")
    assert (merged.config.training.seed, merged.config.training.lr) == (5, 1e-4)


def test_required_keys_are_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training:\n  seed: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    assert [(str(f.place), f.path) for f in caught.value.faults] == [
        (str(path), "model.model_name_or_path"),
        (str(path), "training.output_dir"),
    ]


def test_operator_switches_in_another_section_are_moved_with_a_warning(tmp_path: Path) -> None:
    text = "training:\n  use_flash_attn: true\n  moe_grouped_gemm: false\n"
    text += "optimization:\n  indexer_loss_coeff: 1.0\n"
    loaded = load(tmp_path, text, "data.dataset=x")
    assert loaded.config.optimization.use_flash_attn is True
    assert loaded.config.optimization.moe_grouped_gemm is False
    assert str(loaded.origins["optimization.use_flash_attn"]).endswith("run.yaml:2")
    shown = [warning.replace(f"{tmp_path}/", "") for warning in loaded.warnings]
    assert shown == [
        "run.yaml:2:3  training.use_flash_attn: belongs to another section; "
        "read as optimization.use_flash_attn",
        "run.yaml:3:3  training.moe_grouped_gemm: belongs to another section; "
        "read as optimization.moe_grouped_gemm",
        "run.yaml:5:3  optimization.indexer_loss_coeff: belongs to another section; "
        "read as training.indexer_loss_coeff",
    ]


def test_the_command_line_wins_over_a_moved_key_and_a_double_one_is_refused(tmp_path: Path) -> None:
    text = "training: {use_flash_attn: true}\n"
    loaded = load(tmp_path, text, "--optimization.use_flash_attn", "false")
    assert loaded.config.optimization.use_flash_attn is False
    double = text + "optimization: {use_flash_attn: true}\n"
    assert "optimization.use_flash_attn is set too" in fault_of(tmp_path, double)


def test_environment_variables_and_other_keys_are_inserted(tmp_path: Path) -> None:
    text = """
model: {cache_dir: "${ROOT}/cache", config_overrides: {name: "${NAME:-tiny}"}}
training: {output_dir: "${ROOT}/run", lr: "${LR}", resume_from_checkpoint: "${NULL}"}
data:
  dataset: "${data.dataset_dir}/x.json"
  dataset_dir: ${ROOT}/data
  tokenized_path: ${training.output_dir}
  cutoff_len: ${training.save_steps}
  default_system: a $${literal}
parallel: {recompute_modules: "${parallel.fsdp_modules}", recompute: true}
"""
    path = tmp_path / "run.yaml"
    path.write_text(
        text.replace('"${NULL}"', "${NULL}").replace("resume_from_checkpoint: ${NULL}", "seed: 1")
    )
    config = load_config(
        [str(path), "model.model_name_or_path=${ROOT}/m"], environ={"ROOT": "/r", "LR": "3e-4"}
    ).config
    assert config.model.model_name_or_path == "/r/m"
    assert config.model.cache_dir == "/r/cache"
    assert config.model.config_overrides == {"name": "tiny"}
    assert config.training.lr == 3e-4
    assert config.data.dataset == "/r/data/x.json"
    assert config.data.tokenized_path == "/r/run"
    assert config.data.cutoff_len == 500
    assert config.data.default_system == "a ${literal}"
    assert config.parallel.recompute_modules == config.parallel.fsdp_modules


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "data:\n  dataset: ${NOPE}/x\n",
            "run.yaml:2:12  data.dataset: the environment variable NOPE is not set; "
            "set it, or write ${NOPE:-default}",
        ),
        ("data: {template: '${data.tool_format}', tool_format: '${data.template}'}", "refers to itself: "),
        (
            "data: {dataset: '${data.datset_dir}'}",
            "${data.datset_dir} names no key; did you mean data.dataset_dir?",
        ),
        (
            "data: {dataset: 'a${model.cache_dir}'}",
            "${model.cache_dir} is null and cannot stand inside a text",
        ),
        (
            "data: {dataset: 'a${parallel.fsdp_modules}'}",
            "is a list or mapping and cannot stand inside a text",
        ),
        ("data: {dataset: 'a${B'}", "a ${ without its }"),
        ("data: {dataset: 'a${B C}'}", "is neither ${NAME}, ${NAME:-default} nor ${section.key}"),
        (
            "data: {cutoff_len: '${training.lr}'}",
            "run.yaml:1:20  data.cutoff_len: '1e-05' is not a whole number",
        ),
    ],
)
def test_references_that_lead_nowhere_are_faults(tmp_path: Path, text: str, fault: str) -> None:
    assert fault in fault_of(tmp_path, text)


def test_unknown_paths_keep_non_ascii_text_under_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    folder = tmp_path / "路径 with spaces"
    folder.mkdir()
    loaded = load(folder, "data: {dataset: 数据/训练 一.json}")
    assert loaded.config.data.dataset == "数据/训练 一.json"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TRICKY,
    section=st.sampled_from(["", "training: ", "data:\n  dataset: ", "model: {config_overrides: "]),
)
def test_any_file_loads_or_gives_a_user_error(tmp_path: Path, text: str, section: str) -> None:
    try:
        load(tmp_path, section + text)
    except UserError as error:
        assert str(error)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TRICKY,
    section=st.sampled_from(["", "training: ", "data:\n  dataset: ", "parallel: {fsdp_modules: "]),
)
def test_any_of_many_files_loads_or_gives_a_user_error(tmp_path: Path, text: str, section: str) -> None:
    try:
        load(tmp_path, section + text)
    except UserError as error:
        assert str(error)
