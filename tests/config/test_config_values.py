"""Texts become numbers, booleans, null and lists by the type of their field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configs import REQUIRED, fault_of, load

from shardyard.config import load_config
from shardyard.config.schema import FIELDS, get
from shardyard.config.values import ValueFault, kind_of, read_bool, read_float, read_int

FLOAT_KEYS = [path for path in FIELDS if float in kind_of(FIELDS[path]).scalars]


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["r", "e", "E"]))
def test_every_finite_number_is_read_exactly(number: float, style: str) -> None:
    text = repr(number) if style == "r" else f"{number:.17{style}}"
    assert read_float(text) == number


@given(st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1))
def test_integers_are_read_exactly(number: int) -> None:
    assert read_int(str(number)) == number


@given(st.integers(min_value=-(2**53), max_value=2**53))
def test_integral_floats_are_integers(number: int) -> None:
    assert read_int(f"{number}.0") == number


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()))
def test_fractions_are_no_integers(number: float) -> None:
    with pytest.raises(ValueFault):
        read_int(repr(number))


@given(st.text(max_size=12))
def test_any_other_text_is_refused_as_a_value_fault(text: str) -> None:
    try:
        number = read_float(text)
    except ValueFault:
        return
    assert math.isfinite(number)


@given(st.sampled_from(["true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"]), st.data())
def test_booleans_in_any_case(word: str, data: st.DataObject) -> None:
    cased = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in word)
    assert read_bool(cased) is (word in ("true", "yes", "on", "t", "y", "1"))


@given(st.text(max_size=6))
def test_no_other_text_is_a_boolean(text: str) -> None:
    if text.lower() not in ["true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"]:
        with pytest.raises(ValueFault):
            read_bool(text)


@pytest.mark.parametrize("text", ["1e-5", "2E-4", "1e0", "1.0e-5", ".5", "1.0e+0", '"1e-5"', "'.5'"])
@pytest.mark.parametrize("key", ["training.lr", "training.adam_epsilon", "training.num_train_epochs"])
def test_yaml_1_2_numbers_in_the_file_and_on_the_command_line(tmp_path: Path, key: str, text: str) -> None:
    section, name = key.split(".")
    expected = float(text.strip("\"'"))
    in_file = load(tmp_path, f"training:\n  min_lr: 0\n  {name}: {text}\n" if section == "training" else "")
    on_line = load_config([*REQUIRED, "--training.min_lr", "0", f"--{key}", text.strip("\"'")])
    assert get(in_file.config, key) == expected == get(on_line.config, key)


@pytest.mark.parametrize("key", FLOAT_KEYS)
def test_every_float_field_reads_an_exponent(key: str) -> None:
    loaded_or_fault: Any
    text = "15e-1" if key == "training.fp16_growth_factor" else "5e-1"  # which has to be above 1
    try:
        loaded_or_fault = get(load_config([*REQUIRED, "training.lr=1", f"{key}={text}"]).config, key)
    except Exception as error:
        loaded_or_fault = str(error)
    assert loaded_or_fault == float(text) or "later release" in str(loaded_or_fault)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5.0", 5), ("1e3", 1000), ("0777", 777), ("0o17", 15), ("0x1F", 31), ("+7", 7), ('"12"', 12)],
)
def test_integer_fields_take_integral_numbers(tmp_path: Path, text: str, value: int) -> None:
    assert load(tmp_path, f"data: {{cutoff_len: {text}}}").config.data.cutoff_len == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("abc", "run.yaml:2:15  data.cutoff_len: 'abc' is not a whole number"),
        ("5.5", "run.yaml:2:15  data.cutoff_len: '5.5' is not a whole number"),
        ("12:30", "run.yaml:2:15  data.cutoff_len: '12:30' is not a whole number"),
        ("1_000", "run.yaml:2:15  data.cutoff_len: '1_000' is not a whole number; write 1000"),
        ("2024-01-01", "run.yaml:2:15  data.cutoff_len: '2024-01-01' is not a whole number"),
        ("٣", "run.yaml:2:15  data.cutoff_len: '٣' is not a whole number"),
        ("1e400", "run.yaml:2:15  data.cutoff_len: '1e400' is too large"),
        ("1e30", "run.yaml:2:15  data.cutoff_len: '1e30' is too large"),
        ("-1", "run.yaml:2:15  data.cutoff_len: -1 is out of range; it must be at least 1"),
        ("0", "run.yaml:2:15  data.cutoff_len: 0 is out of range; it must be at least 1"),
        ("[1, 2]", "run.yaml:2:15  data.cutoff_len: a list, but integer is wanted"),
        ("{a: 1}", "run.yaml:2:15  data.cutoff_len: a mapping, but integer is wanted"),
        (
            "null",
            "run.yaml:2:15  data.cutoff_len: null, but integer is wanted; leave the key out for its default",
        ),
        (
            "~",
            "run.yaml:2:15  data.cutoff_len: null, but integer is wanted; leave the key out for its default",
        ),
        (
            "",
            "run.yaml:2:14  data.cutoff_len: null, but integer is wanted; leave the key out for its default",
        ),
        (
            "None",
            "run.yaml:2:15  data.cutoff_len: None, but integer is wanted; leave the key out for its default",
        ),
    ],
)
def test_what_is_no_integer_is_shown_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    assert fault_of(tmp_path, f"data:\n  cutoff_len: {text}\n") == fault


@pytest.mark.parametrize("text", [".nan", "NaN", "inf", "-.inf", "Infinity"])
def test_numbers_are_finite(tmp_path: Path, text: str) -> None:
    assert "training.lr" in fault_of(tmp_path, f"training: {{lr: {text}}}")


@pytest.mark.parametrize(
    ("text", "value"), [('"False"', False), ("'no'", False), ("0", False), ("1", True), ("ON", True)]
)
def test_quoted_and_worded_booleans(tmp_path: Path, text: str, value: bool) -> None:
    assert (
        load(tmp_path, f"training: {{disable_shuffling: {text}}}").config.training.disable_shuffling is value
    )


def test_what_is_no_boolean_is_an_error(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, "training: {disable_shuffling: maybe}")
    assert fault == (
        "run.yaml:1:31  training.disable_shuffling: 'maybe' is not a boolean; write true or false"
    )


@pytest.mark.parametrize(
    "text", ["no", "yes", "0777", "12:30", "1_000", "2024-01-01", "1e5", "true", '"null"', '"~"']
)
def test_text_fields_keep_their_text(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"data: {{default_system: {text}}}").config.data.default_system == text.strip('"')


@pytest.mark.parametrize("text", ["null", "~", "", "Null"])
def test_null_means_null(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, f"training:\n  save_total_limit: {text}\ndata:\n  enable_thinking: {text}\n")
    assert loaded.config.training.save_total_limit is None
    assert loaded.config.data.enable_thinking is None


@pytest.mark.parametrize("word", ["None", "none"])
def test_the_word_none_is_null_with_a_warning(tmp_path: Path, word: str) -> None:
    loaded = load(tmp_path, f"model:\n  tokenizer_name_or_path: {word}\n", "data.dataset=x")
    assert loaded.config.model.tokenizer_name_or_path is None
    (warning,) = loaded.warnings
    assert warning.endswith(
        f"run.yaml:2:27  model.tokenizer_name_or_path: the word {word} is read as null; write null"
    )


OPTIONAL_TEXTS = [
    path
    for path in FIELDS
    if kind_of(FIELDS[path]).optional
    and str in kind_of(FIELDS[path]).scalars
    and path != "data.default_system"
]


@pytest.mark.parametrize("path", OPTIONAL_TEXTS)
@pytest.mark.parametrize("words", ["", '""', "None"])
def test_no_optional_text_becomes_an_empty_or_none_path(tmp_path: Path, path: str, words: str) -> None:
    section, key = path.split(".")
    if path == "parallel.efsdp_shard_placement_fn":
        return  # its default is not null: null is a change that is refused for now
    assert get(load(tmp_path, f"{section}:\n  {key}: {words}\n").config, path) is None


def test_an_empty_default_system_stays_empty(tmp_path: Path) -> None:
    assert load(tmp_path, 'data: {default_system: ""}').config.data.default_system == ""


@pytest.mark.parametrize("text", ["~", "null", '""', "None"])
def test_a_required_path_cannot_be_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{model_name_or_path: x}}\ntraining: {{output_dir: {text}}}\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"training.output_dir: .* it has no default"):
        load_config([str(path)])


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    loaded = load(
        tmp_path, "model: {cache_dir: ~/cache}", "training.output_dir=~/run", "data.dataset=~/a.json,b"
    )
    assert loaded.config.model.cache_dir == "/home/someone/cache"
    assert loaded.config.training.output_dir == "/home/someone/run"
    assert loaded.config.data.dataset == ("/home/someone/a.json", "b")


def test_a_scalar_is_a_list_of_one(tmp_path: Path) -> None:
    assert load(tmp_path, "parallel: {fsdp_modules: lm_head}").config.parallel.fsdp_modules == ("lm_head",)


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    assert "parallel.fsdp_modules: an empty list" in fault_of(tmp_path, "parallel: {fsdp_modules: []}")


def test_list_items_are_typed_and_named(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, "training: {profile: true, profile_ranks: [0, x]}")
    assert "training.profile_ranks[1]: 'x' is not a whole number" in fault
    kept = load(tmp_path, "training: {profile_ranks: [1e0, '2']}")
    assert kept.config.training.profile_ranks == (1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{file_name: a.json}", {"file_name": "a.json"}),
        ("[a.json, b.json]", ("a.json", "b.json")),
        ("a.json, b.json", ("a.json", "b.json")),
        ("alpaca_full", "alpaca_full"),
        ("{}", None),
        ("""'{"file_name": "a.json"}'""", {"file_name": "a.json"}),
    ],
)
def test_datasets_in_every_form(tmp_path: Path, text: str, value: object) -> None:
    assert load(tmp_path, f"data:\n  dataset: {text}\n").config.data.dataset == value


def test_free_mappings_follow_the_yaml_1_2_core_schema(tmp_path: Path) -> None:
    text = """
model:
  config_overrides:
    num_hidden_layers: 4
    rope_scaling: {rope_type: yarn, factor: 4e0, names: [no, ~, 'null', "5", 2024-01-01, 0x10, TRUE, 12:30]}
"""
    assert load(tmp_path, text).config.model.config_overrides == {
        "num_hidden_layers": 4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "names": ["no", None, "null", "5", "2024-01-01", 16, True, "12:30"],
        },
    }


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("True", True), ("off", False), ("AUTO", "auto")]
)
def test_operator_switches(text: str, value: object) -> None:
    loaded = load_config([*REQUIRED, "--optimization.use_flash_attn", text])
    assert loaded.config.optimization.use_flash_attn == value


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("full", "full"), ("no", False), ("none", "none")]
)
def test_recompute_is_a_boolean_or_a_mode(tmp_path: Path, text: str, value: object) -> None:
    assert load(tmp_path, f"parallel: {{recompute: {text}}}").config.parallel.recompute == value


def test_a_wrong_choice_lists_the_right_ones(tmp_path: Path) -> None:
    assert fault_of(tmp_path, "training: {lr_scheduler_type: cosin}") == (
        "run.yaml:1:31  training.lr_scheduler_type: 'cosin' is not one of cosine, linear, constant, wsd, "
        "cosine_with_restarts, inverse_sqrt, polynomial, constant_with_warmup, warmup_stable_decay, "
        "cosine_with_min_lr"
    )
    assert "is not one of full, selective, none, true, false" in fault_of(
        tmp_path, "parallel: {recompute: some}"
    )


@pytest.mark.parametrize(("word", "value"), [("false", False), ("0", False), ("Yes", True)])
def test_booleans_from_the_environment_are_read_as_words(tmp_path: Path, word: str, value: bool) -> None:
    text = "training:\n  disable_shuffling: ${X}\n"
    assert load(tmp_path, text, environ={"X": word}).config.training.disable_shuffling is value
