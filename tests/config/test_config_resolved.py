"""The resolved configuration: its table and YAML, `check`, `schema` and the generated pages."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.configs import load

from shardyard.cli.check import check, schema
from shardyard.config import Config, load_config
from shardyard.config.docs import CHINESE, ENGLISH, render
from shardyard.config.explain import chinese
from shardyard.config.parallelism_tables import refreshed
from shardyard.config.resolved import dump_yaml, format_table
from shardyard.config.schema import FIELDS
from shardyard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TEXT = """
model: {tokenizer_name_or_path: None}
data: {dataset: {file_name: "a\\nb: #${X:-c}", n: [1, 2.5e-7, null, true, "5"]}, default_system: ""}
parallel: {recompute: full, fsdp_size: 2}
training: {lr: 1e-8, warmup_steps: 3, save_total_limit: null}
"""


def _reload(folder: Path, text: str) -> Config:
    path = folder / "resolved_config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config([str(path)], environ={}).config


def test_the_resolved_yaml_loads_to_an_equal_config_with_origins(tmp_path: Path) -> None:
    loaded = load(tmp_path, TEXT, "--training.seed", "7")
    text = dump_yaml(loaded.config, loaded.origins)
    assert _reload(tmp_path, text) == loaded.config
    lines = text.replace(f"{tmp_path}/", "").splitlines()
    assert "  seed: 7  # command line" in lines
    assert "  lr: 1e-08  # run.yaml:5" in lines
    assert "  min_lr: 1e-08  # follows training.lr" in lines
    assert "  cutoff_len: 2048  # default" in lines


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    system=st.text(),
    dataset=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_any_text_and_mapping_survives_the_resolved_yaml(tmp_path: Path, system: str, dataset: dict) -> None:
    plain = load(tmp_path, "").config
    data = plain.data.model_copy(update={"default_system": system, "dataset": dataset})
    config = plain.model_copy(update={"data": data})
    assert _reload(tmp_path, dump_yaml(config, {})) == config


def test_access_tokens_are_neither_shown_nor_written(tmp_path: Path) -> None:
    loaded = load(tmp_path, "model: {hf_hub_token: hf_secret}")
    assert loaded.config.model.hf_hub_token == "hf_secret"
    assert "hf_secret" not in format_table(loaded.config, loaded.origins) + dump_yaml(
        loaded.config, loaded.origins
    )


def test_the_table_shows_every_setting_and_its_origin(tmp_path: Path) -> None:
    loaded = load(tmp_path, TEXT)
    rows = {line.split()[0] for line in format_table(loaded.config, loaded.origins).splitlines()}
    assert rows >= {path.split(".")[1] for path in FIELDS}


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path, "").config
    with pytest.raises(Exception, match="frozen"):
        config.training.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_check_prints_the_table_the_warnings_and_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_name_or_path: m}\ntraining: {output_dir: o}\n", encoding="utf-8")
    assert check([str(path), "--world-size", "4", "parallel.fsdp_size=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warning: data.dataset: not set; training needs it" in lines
    assert any(line.startswith("layout on 4 ranks: pp 1 x dp_replicate 2 x fsdp 2 x tp 1") for line in lines)
    assert lines[-1] == f"{path}: valid"
    with pytest.raises(UserError, match=r"parallel.fsdp_size: 8 does not divide the 4 ranks"):
        check([str(path), "--world-size=4", "parallel.fsdp_size=8"])
    for words in (["--world-size", "x"], ["--world-size"]):
        with pytest.raises(UserError, match="--world-size"):
            check([str(path), *words])
    assert not (tmp_path / "o").exists()


def test_explain_documents_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--explain", "training.lr"]) == 0
    shown = capsys.readouterr().out
    assert "default: 1e-05" in shown and "Peak learning rate." in shown and "峰值学习率" in shown
    assert check(["--explain=cutoff_len"]) == 0
    assert capsys.readouterr().out.startswith("data.cutoff_len\n")
    with pytest.raises(UserError, match=r"did you mean training.lr\?"):
        check(["--explain", "training.learning_rate"])


def test_the_schema_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema([]) == 0
    printed = json.loads(capsys.readouterr().out)
    definitions = printed["$defs"]
    assert printed["additionalProperties"] is False
    assert definitions["TrainingConfig"]["properties"]["lr"]["default"] == 1e-5
    assert sum(len(part["properties"]) for part in definitions.values() if "properties" in part) == len(
        FIELDS
    )
    with pytest.raises(UserError, match="takes no arguments"):
        schema(["x"])


def test_the_generated_pages_are_current() -> None:
    hint = "run: python -m shardyard.config.docs"
    assert (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8") == render(ENGLISH), hint
    assert (ROOT / "docs" / "zh" / "arguments.md").read_text(encoding="utf-8") == render(CHINESE), hint
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert page == refreshed(page), hint
    assert all(f"<!-- table: {name} -->\n\n|" in page for name in ("rules", "support"))


def test_every_field_has_a_meaning_in_both_languages() -> None:
    for path, info in FIELDS.items():
        assert info.description and "\n" not in info.description, path
        assert any("\u4e00" <= char <= "\u9fff" for char in chinese(path)), path


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"file_name": "x.json", "formating": "sharegpt"}, r"unknown key 'formating'.*formatting"),
        (
            {"file_name": "x.json", "formatting": "sharegpt2"},
            r"data\.dataset\.formatting: 'sharegpt2' is not one",
        ),
        ("broken", r"dataset_info\.json: broken.*unknown key 'colums'"),
    ],
)
def test_check_refuses_an_entry_that_a_run_would_refuse(
    tmp_path: Path, dataset: object, message: str
) -> None:
    entries = {"alpaca_full": {"file_name": "a.json"}, "broken": {"file_name": "b.json", "colums": {}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    words = [
        f"data.dataset={dataset if isinstance(dataset, str) else json.dumps(dataset)}",
        f"data.dataset_dir={tmp_path}",
        "training.output_dir=o",
    ]
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_name_or_path: m}")
    with pytest.raises(UserError, match=message):
        check([str(path), *words])
    assert check([str(path), "data.dataset=alpaca_full", *words[1:]]) == 0  # whose file may be elsewhere


CHECK = "import sys; from shardyard.cli.check import check; code = check(sys.argv[1:]); "


def test_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        CHECK + "sys.exit(code or any(n in sys.modules for n in ('torch', 'transformers', 'rich', 'typer')))"
    )
    words = ["model.model_name_or_path=m", "training.output_dir=o"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_check_answers_in_half_a_second(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT, encoding="utf-8")
    words = [str(path), "model.model_name_or_path=m", "training.output_dir=o", "data.dataset=x.json"]
    fastest = float("inf")
    for _ in range(5):  # of a processor: the machine may be busy with other work
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "shardyard", "check", *words],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        fastest = min(fastest, seconds)
        if fastest < 0.5:
            break
    assert fastest < 0.5


def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path: Path) -> None:
    words = ["check", "training.lr=abc", "model.model_name_or_path=m", f"training.output_dir={tmp_path}/o"]
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: command line  training.lr: 'abc' is not a number\n"
    assert list(tmp_path.iterdir()) == []
