"""The command line: every way to write an override, precedence, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.configs import REQUIRED, fault_of, load

from shardyard.config import load_config
from shardyard.config.schema import get
from shardyard.errors import UserError


@pytest.mark.parametrize(
    "words",
    [
        ["--training.lr", "3e-4"],
        ["--training.lr=3e-4"],
        ["training.lr=3e-4"],
        ["training.lr=1", "--training.lr", "3e-4"],
    ],
)
def test_an_override_can_be_written_three_ways_and_the_last_wins(tmp_path: Path, words: list[str]) -> None:
    loaded = load(tmp_path, "training: {lr: 2e-4}", *words)
    assert loaded.config.training.lr == 3e-4
    assert str(loaded.origins["training.lr"]) == "command line"


@pytest.mark.parametrize("position", range(3))
def test_the_file_may_stand_anywhere(tmp_path: Path, position: int) -> None:
    path = tmp_path / "run.yml"
    path.write_text("training: {seed: 9}", encoding="utf-8")
    words = [*REQUIRED, "--training.log_throughput", "training.lr=1"]
    words.insert((0, 5, 6)[position], str(path))
    loaded = load_config(words)
    assert (loaded.file, loaded.config.training.seed, loaded.config.training.log_throughput) == (
        path,
        9,
        True,
    )


def test_an_empty_file_does_not_shadow_the_words(tmp_path: Path) -> None:
    assert load(tmp_path, "", "--training.seed", "3").config.training.seed == 3


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--training.disable_shuffling"], True),
        (["--training.disable_shuffling", "--training.seed", "1"], True),
        (["--training.disable_shuffling", "training.seed=1"], True),
        (["--training.disable_shuffling", "False"], False),
        (["--training.disable_shuffling=0"], False),
        (["--training.disable_shuffling", "1"], True),
    ],
)
def test_bare_boolean_flags_are_true_even_as_the_last_word(
    tmp_path: Path, words: list[str], value: bool
) -> None:
    for text in ("training: {disable_shuffling: true}", "training: {disable_shuffling: false}"):
        assert load(tmp_path, text, *words).config.training.disable_shuffling is value


def test_lists_take_several_words_and_json(tmp_path: Path) -> None:
    expected = ("a.{*}", "b")
    for words in (
        ["--parallel.fsdp_modules", "a.{*}", "b", "--training.seed", "1"],
        ["--parallel.fsdp_modules", "a.{*}", "b", "training.seed=1"],
        ['parallel.fsdp_modules=["a.{*}","b"]'],
        ["--parallel.fsdp_modules", '["a.{*}", "b"]'],
        ["--parallel.fsdp_modules=['a.{*}', b]"],
    ):
        assert load(tmp_path, "parallel: {fsdp_modules: x}", *words).config.parallel.fsdp_modules == expected


def test_a_list_ends_where_the_yaml_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {seed: 4}", encoding="utf-8")
    loaded = load_config([*REQUIRED, "--parallel.fsdp_modules", "a", "b", str(path)])
    assert (loaded.config.parallel.fsdp_modules, loaded.config.training.seed) == (("a", "b"), 4)


@pytest.mark.parametrize(
    "text",
    ['{"file_name": "/a b/c=d.parquet", "n": [1, {"x": null}], "u": "\\ud83d\\ude00"}'],
)
def test_mappings_are_json(tmp_path: Path, text: str) -> None:
    expected = {"file_name": "/a b/c=d.parquet", "n": [1, {"x": None}], "u": "😀"}
    for words in (["--data.dataset", text], [f"data.dataset={text}"], [f"--data.dataset={text}"]):
        assert load(tmp_path, "data: {dataset: {old: 1}}", *words).config.data.dataset == expected


def test_mappings_may_be_flow_yaml(tmp_path: Path) -> None:
    loaded = load(tmp_path, "", "model.config_overrides={rope: {type: yarn}, n: 1e-5}")
    assert loaded.config.model.config_overrides == {"rope": {"type": "yarn"}, "n": 1e-5}


def test_null_empty_and_equals_signs(tmp_path: Path) -> None:
    text = "training: {save_total_limit: 5, resume_from_checkpoint: x}\ndata: {template: qwen3}"
    loaded = load(
        tmp_path,
        text,
        "training.save_total_limit=null",
        "training.resume_from_checkpoint=",
        "--data.template",
        "",
        "data.default_system=a=b c=d",
    )
    config = loaded.config
    assert config.training.save_total_limit is None
    assert config.training.resume_from_checkpoint is None
    assert config.data.template is None
    assert config.data.default_system == "a=b c=d"


def test_a_value_that_looks_like_an_override_is_the_value_of_its_option(tmp_path: Path) -> None:
    loaded = load(tmp_path, "", "--data.default_system", "training.seed=3")
    assert (loaded.config.data.default_system, loaded.config.training.seed) == ("training.seed=3", 42)


def test_negative_numbers_are_values(tmp_path: Path) -> None:
    assert load(tmp_path, "", "--training.save_steps", "-1").config.training.save_steps == -1
    fault = fault_of(tmp_path, "", "--training.lr", "-1e-6")
    assert fault == "command line  training.lr: -1e-06 is out of range; it must be at least 0"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--training.report_to", "wandb"], "training.report_to: unknown key; the log and metrics.jsonl in"),
        (["--model.lora_rank", "8"], "model.lora_rank: unknown key; all weights are trained, but for"),
        (["--training.bf16"], "training.bf16: unknown key; did you mean parallel.param_dtype?"),
        (["--training.save_s", "7"], "training.save_s: unknown key; did you mean training.save_steps?"),
        (["--parallel.lr", "7"], "parallel.lr: unknown key; did you mean training.lr?"),
        (["lr=7"], "lr: unknown key; did you mean training.lr?"),
        (["--lr"], "lr: unknown key; did you mean training.lr?"),
        (["--bf16=0"], "bf16: unknown key"),
        (["--training.max_new_tokens:", "5"], "unknown key; did you mean inference.max_new_tokens?"),
        (["--training.lr"], "training.lr: needs a value"),
        (["--training.lr", "--training.seed", "1"], "training.lr: needs a value"),
        (["--training.log_throughput", "maybe"], "training.log_throughput: 'maybe' is not a boolean"),
        (["stray"], "unexpected word 'stray'"),
        (["--training.seed", "1", "2"], "unexpected word '2'"),
        (["other.yaml"], "two YAML files"),
        (["data.dataset.file_name=x"], "lists and mappings are replaced whole; write data.dataset=..."),
        (["parallel.fsdp_modules[0]=x"], "unexpected word"),
        (["data.dataset={file_name"], "is neither JSON nor flow YAML"),
        (['data.dataset={"a": 1, "a": 2}'], "'a' is written twice"),
        (["--training.seed", "1 2"], "training.seed: '1 2' is not a whole number"),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path: Path, words: list[str], fault: str) -> None:
    message = fault_of(tmp_path, "", *words)
    assert message.startswith("command line  ")
    assert fault in message


def test_no_words_at_all_are_explained() -> None:
    with pytest.raises(UserError, match="no configuration given"):
        load_config([])


KEYS = {
    "training.lr": st.floats(min_value=0.01, max_value=1),
    "training.seed": st.integers(min_value=0, max_value=10**9),
    "training.log_throughput": st.booleans(),
    "data.cutoff_len": st.integers(min_value=1, max_value=10**6),
    "parallel.cpu_offload": st.booleans(),
    "model.cache_dir": st.text(alphabet="abc/_", min_size=1, max_size=9),
}
VALUES = st.fixed_dictionaries({}, optional=KEYS)
DEFAULTS = load_config(REQUIRED).config


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(in_file=VALUES, on_line=VALUES)
def test_command_line_over_file_over_default(tmp_path: Path, in_file: dict, on_line: dict) -> None:
    sections: dict[str, str] = {}
    for path, value in in_file.items():
        section, key = path.split(".")
        sections[section] = sections.get(section, f"{section}:\n") + f"  {key}: {value}\n"
    loaded = load(tmp_path, "".join(sections.values()), *(f"{key}={value}" for key, value in on_line.items()))
    for path in KEYS:
        if path in on_line:
            expected, origin = on_line[path], "command line"
        elif path in in_file:
            expected, origin = in_file[path], "file"
        else:
            expected, origin = get(DEFAULTS, path), "default"
        assert get(loaded.config, path) == expected
        assert loaded.origins[path].kind == origin


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(
                ["--training.lr", "--parallel.fsdp_modules", "--", "---", "=", "a.b=c", "--=", "-"]
            ),
            st.sampled_from(
                ["data.dataset={", "data.dataset=[]", "--training.lr=${A", "model.cache_dir=${HOME}"]
            ),
        ),
        max_size=6,
    )
)
def test_any_words_load_or_give_a_user_error(words: list[str]) -> None:
    try:
        load_config(words)
    except UserError as error:
        assert str(error)
