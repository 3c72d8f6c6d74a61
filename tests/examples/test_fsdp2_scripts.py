"""The examples' files load, and their scripts hand torchrun words that load too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.example_scripts import EXAMPLES, REPOSITORY, SCRIPTS, by_path, copy_outside, run_script

from shardyard.config import load_config

YAMLS = sorted(EXAMPLES.rglob("*.yaml"))
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$RECORD"
env -0 > "$RECORD.env"
echo "the stub speaks"
exit "$STUB_EXIT"
"""


@dataclass(frozen=True)
class Outcome:
    """What a script did: its exit code and output, and the words and environment that torchrun got."""

    code: int
    output: str
    words: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """torchrun's own options, before the program's name."""
        own = self.words[: self.words.index("train_fsdp2.py")]
        return dict(zip(own[::2], own[1::2], strict=True))

    @property
    def overrides(self) -> list[str]:
        """The words after the program's name."""
        return self.words[self.words.index("train_fsdp2.py") + 1 :]


class Runner:
    """Runs scripts against a torchrun that records its words."""

    def __init__(self, root: Path) -> None:
        self.root = copy_outside(root)
        self._record = root / "record"
        self._stub = root / "bin" / "torchrun"
        self._stub.parent.mkdir()
        self._stub.write_text(STUB, encoding="utf-8")
        self._stub.chmod(0o755)

    def run(self, script: Path, *words: str, cwd: Path, stub_exit: int = 0, **environment: str) -> Outcome:
        environment |= {"RECORD": str(self._record), "STUB_EXIT": str(stub_exit)}
        done = run_script(self.root, script, *words, cwd=cwd, first_on_path=self._stub.parent, **environment)
        recorded = self._record.read_text(encoding="utf-8").split("\0")[:-1]
        lines = Path(f"{self._record}.env").read_text(encoding="utf-8").split("\0")[:-1]
        variables = dict(line.split("=", 1) for line in lines)
        return Outcome(done.returncode, done.stdout + done.stderr, recorded, variables)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_there_are_examples_for_each_promised_family() -> None:
    assert {path.parent.name for path in YAMLS} == {"data", "quickstart", "qwen3", "qwen3_moe", "smollm2"}
    assert [path.with_suffix(".yaml") for path in SCRIPTS] == [
        path for path in YAMLS if path.parent.name not in ("data", "quickstart")
    ]


def test_there_is_an_example_of_each_size_to_tune_and_to_pretrain() -> None:
    """File names are the reference's: a size such as 1.7B is ``1point7b`` in all of them."""
    wanted = {
        f"{folder}/{kind}_{folder.removesuffix('_moe')}_{size}_4k_fsdp2_{machine}.yaml"
        for folder, sizes in (
            ("qwen3", ("0point6b", "1point7b", "4b", "8b", "14b", "32b")),
            ("qwen3_moe", ("30b_a3b", "235b_a22b")),
        )
        for size in sizes
        for kind, machine in (("tune", "A2"), ("pretrain", "A3"))
    }
    there = {path.relative_to(EXAMPLES / "fsdp2").as_posix() for path in YAMLS if "qwen3" in path.parent.name}
    assert there == wanted
    for path in YAMLS:
        if "qwen3" in path.parent.name:
            hub = path.read_text(encoding="utf-8").split("model_name_or_path: Qwen/Qwen3-")[1].split("\n")[0]
            assert f"_{hub.lower().replace('.', 'point').replace('-', '_')}_" in path.stem


@pytest.mark.parametrize("path", YAMLS, ids=by_path)
def test_a_yaml_loads_strictly_and_without_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert load_config([str(path)]).warnings == []


@pytest.mark.parametrize("script", SCRIPTS, ids=by_path)
def test_a_script_hands_torchrun_words_that_load(script: Path, runner: Runner, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    data = tmp_path / "rows.jsonl"
    model.mkdir()
    data.touch()
    overrides = ["--training.lr", "3e-4", "--training.log_throughput"]
    outcome = runner.run(
        script, *overrides, cwd=tmp_path, NPUS_PER_NODE="4", NNODES="3", NODE_RANK="2", MASTER_ADDR="node-0",
        MASTER_PORT="7001", MODEL_PATH="my model", DATA_PATH="rows.jsonl", OUTPUT_DIR="runs/new one",
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert outcome.options == {
        "--nproc_per_node": "4",
        "--nnodes": "3",
        "--node_rank": "2",
        "--master_addr": "node-0",
        "--master_port": "7001",
    }
    assert outcome.environment["PWD"] == str(runner.root)
    yaml, *overrides = outcome.overrides
    config = load_config([str(runner.root / yaml), *overrides]).config
    assert config.model.model_name_or_path == str(model)
    assert config.data.dataset == str(data)
    assert config.training.output_dir == str(tmp_path / "runs/new one")
    assert config.training.lr == 3e-4 and config.training.log_throughput is True
    assert config.parallel.fsdp_size in (12, None)


@pytest.mark.parametrize("script", SCRIPTS, ids=by_path)
def test_a_script_needs_nothing_from_the_environment(script: Path, runner: Runner, tmp_path: Path) -> None:
    outcome = runner.run(script, cwd=tmp_path)
    small = any(size in script.stem for size in ("0point6b", "1point7b"))  # the reference's 1.7B takes 4
    ranks = "4" if small else {"A2": "8", "A3": "16", "cpu": "2"}[script.stem.rpartition("_")[2]]
    assert outcome.options == {
        "--nproc_per_node": ranks,
        "--nnodes": "1",
    }  # a free port is torchrun's to find
    yaml, *overrides = outcome.overrides
    assert Path(yaml) == script.with_suffix(".yaml").relative_to(REPOSITORY)
    config = load_config([str(runner.root / yaml), *overrides]).config
    alone = load_config([str(runner.root / yaml)]).config
    assert config.parallel.fsdp_size in (int(ranks), None)
    assert config.model == alone.model and config.data == alone.data and config.training == alone.training
    assert runner.run(script, cwd=tmp_path, NPROC_PER_NODE="3").options["--nproc_per_node"] == "3"


@pytest.mark.parametrize("script", SCRIPTS, ids=by_path)
def test_a_script_fails_when_torchrun_fails_and_keeps_a_log(
    script: Path, runner: Runner, tmp_path: Path
) -> None:
    outcome = runner.run(script, cwd=tmp_path, stub_exit=7)
    assert outcome.code == 7
    assert "the stub speaks" in outcome.output
    (log,) = (runner.root / "logs").iterdir()
    assert log.name.startswith(f"{script.stem}_") and log.suffix == ".log"
    assert log.read_text(encoding="utf-8") == "the stub speaks\n"


def test_data_may_be_a_registered_name_or_an_inline_entry(runner: Runner, tmp_path: Path) -> None:
    script = EXAMPLES / "fsdp2/qwen3/tune_qwen3_8b_4k_fsdp2_A2.sh"
    for given, wanted in (
        ("sharegpt4_zh", "sharegpt4_zh"),
        ('{"file_name": "x.jsonl"}', {"file_name": "x.jsonl"}),
    ):
        yaml, *overrides = runner.run(script, cwd=tmp_path, DATA_PATH=given).overrides
        assert load_config([str(runner.root / yaml), *overrides]).config.data.dataset == wanted


def test_without_cann_the_environment_stays_as_it_was(runner: Runner, tmp_path: Path) -> None:
    script = EXAMPLES / "fsdp2/qwen3/tune_qwen3_8b_4k_fsdp2_A2.sh"
    got = runner.run(script, cwd=tmp_path, HOME=str(tmp_path), ASCEND_TOOLKIT_HOME=str(tmp_path)).environment
    assert not [
        name for name in got if name.startswith(("HCCL_", "TASK_QUEUE", "CPU_AFFINITY", "PYTORCH_NPU"))
    ]


def test_with_cann_its_script_is_sourced_and_a_set_value_is_kept(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "set_env.sh").write_text(f"export ASCEND_OPP_PATH={tmp_path}/opp\n", encoding="utf-8")
    script = EXAMPLES / "fsdp2/qwen3/pretrain_qwen3_8b_4k_fsdp2_A3.sh"
    got = runner.run(
        script, cwd=tmp_path, ASCEND_TOOLKIT_HOME=str(tmp_path), HCCL_CONNECT_TIMEOUT="99"
    ).environment
    assert got["ASCEND_OPP_PATH"] == f"{tmp_path}/opp"
    assert got["HCCL_CONNECT_TIMEOUT"] == "99"
    assert got["TASK_QUEUE_ENABLE"] == "2"
    assert got["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert got["TORCH_HCCL_ZERO_COPY"] == "1"
