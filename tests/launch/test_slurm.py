"""What SLURM's variables mean for a launch, and whole starts from them with two tasks on the loopback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.nodes import PYTHON, ROOT, Machine, Process, free_port, metrics, wait_for
from support.ranks import RankPool
from support.whole_runs import YAML, train, write_numbered, write_workspace

from shardyard.cli import slurm
from shardyard.cli.launch import Launch, take_launch
from shardyard.errors import UserError

NODE_1 = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[003,009]", "SLURM_JOB_NODELIST": "gpu[001-009]",
}  # fmt: skip
"""Node 1 of a step of one task on each of two nodes, in a job of four."""
PORT = 15000 + 4711


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b-2.cluster", ["a", "b-2.cluster"]),
        ("node[003-005,9]", ["node003", "node004", "node005", "node9"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a[1-2]-ib,b[7],c", ["a1-ib", "a2-ib", "b7", "c"]),
        ("r[1-2]n[01,3]", ["r1n01", "r1n3", "r2n01", "r2n3"]),
    ],
)
def test_node_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert slurm.expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "no de", "n[1-2]]"])
def test_a_list_that_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(UserError, match=r"node list .* cannot be read; give --master-addr"):
        slurm.expand_hosts(text)


def test_a_launcher_started_by_srun_takes_nodes_number_and_meeting_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = take_launch(["a.yaml"], NODE_1)
    assert launch == Launch(nnodes=2, node_rank=1, master_addr="gpu003", master_port=PORT)
    assert capsys.readouterr().err == (
        f"taken from SLURM: --nnodes 2, --node-rank 1, --master-addr gpu003, --master-port {PORT}\n"
    )


def test_another_step_of_the_job_meets_at_another_port() -> None:
    assert take_launch([], NODE_1 | {"SLURM_STEP_ID": "1"}).master_port != PORT


def test_options_win_over_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    launch = take_launch(["--master-addr", "10.0.0.9", "--master-port=999"], NODE_1)
    assert launch == Launch(nnodes=2, node_rank=1, master_addr="10.0.0.9", master_port=999)
    assert capsys.readouterr().err == "taken from SLURM: --nnodes 2, --node-rank 1\n"
    assert take_launch(["--rdzv-endpoint", "x:77"], NODE_1) == Launch(
        nnodes=2, node_rank=None, master_addr="x", master_port=77
    )
    assert take_launch(["--nnodes", "1"], NODE_1) == Launch()


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"},  # the shell of salloc
        NODE_1 | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc with an interactive step
        {k: v for k, v in NODE_1.items() if "STEP" not in k},  # the script of sbatch
    ],
)
def test_a_shell_in_an_allocation_trains_on_its_own_machine_and_says_so(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert take_launch(["a.yaml"], environ) == Launch()
    told = capsys.readouterr().err
    assert (
        told.startswith("SLURM: this allocation has 2 nodes; training on this one alone") and "srun" in told
    )
    assert slurm.adopt_rank(dict(environ)) == ""


def test_an_allocation_of_one_node_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "a"}
    assert take_launch(["a.yaml"], NODE_1 | one | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}) == Launch()
    assert capsys.readouterr().err == ""


def test_several_tasks_that_would_each_start_all_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"8 tasks on a node.*--ntasks-per-node=1"):
        take_launch(["a.yaml"], NODE_1 | {"SLURM_TASKS_PER_NODE": "8(x2)"})


def test_a_task_per_rank_becomes_torchs_variables() -> None:
    environ = NODE_1 | {
        "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2,3", "SLURM_PROCID": "4", "SLURM_LOCALID": "2",
    }  # fmt: skip
    said = slurm.adopt_rank(environ)
    assert said == f"SLURM: 5 ranks on 2 node(s), one per task; they meet at gpu003:{PORT}"
    assert environ.items() >= {
        "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "gpu003", "MASTER_PORT": str(PORT),
    }.items()  # fmt: skip


def test_a_rank_of_a_launcher_is_left_alone() -> None:
    environ = NODE_1 | {"RANK": "0", "WORLD_SIZE": "2"}
    before = dict(environ)
    assert slurm.adopt_rank(environ) == "" and environ == before


def test_variables_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"task 1 of 2 .* is number 3 of node 1"):
        slurm.adopt_rank(NODE_1 | {"SLURM_LOCALID": "3"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "1"], "--node-rank beside --rdzv"),
        (["--nnodes", "2", "--rdzv-id", "a"], "--rdzv-endpoint HOST:PORT is needed"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b"], "HOST:PORT is wanted"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1"], "there is c10d"),
        (["--nnodes", "2"], "needs --node-rank and --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"], "ranks count from 0"),
        (["--nnodes", "1:4"], "a whole number from 1 on is wanted"),
        (["--max-restarts", "-1"], "a whole number from 0 on is wanted"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_launch(words, {})


def step(task: int, **more: str) -> dict[str, str]:
    """Variables of ``task`` of 2, each on a "node" that is the loopback."""
    return NODE_1 | {
        "SLURM_STEP_NODELIST": "127.0.0.1,localhost", "SLURM_NODEID": str(task), "SLURM_PROCID": str(task),
        **more,
    }  # fmt: skip


NOTE = """
import os
from pathlib import Path
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"
Path("rank" + os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
SRUN_SHARDYARD = """
import sys
from shardyard.cli.launch import take_launch
from shardyard.cli.train import start_ranks
sys.exit(start_ranks([sys.executable, "note.py"], 2, take_launch([])))
"""


def test_srun_with_a_task_per_node_starts_the_ranks_of_both(tmp_path: Path) -> None:
    (tmp_path / "note.py").write_text(NOTE, encoding="utf-8")
    job = free_port()
    port = 15000 + job % 15000
    nodes = [
        Process(
            Machine(), [*PYTHON, "-c", SRUN_SHARDYARD], tmp_path, f"node{task}",
            **step(task, SLURM_JOB_ID=str(job)),
        )
        for task in range(2)
    ]  # fmt: skip
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].text() + nodes[1].text()
    notes = [(tmp_path / f"rank{rank}").read_text() for rank in range(4)]
    assert notes == [f"{rank} 4 {rank % 2} {rank // 2} {port}" for rank in range(4)]


class Tasks:
    """``srun python train_fsdp2.py FILE`` with two tasks."""

    def __init__(self, folder: Path, out: str, *words: str) -> None:
        config = folder / f"{out}.yaml"
        config.write_text(YAML.format(folder=folder, out=folder / out), encoding="utf-8")
        job = str(free_port())
        command = [*PYTHON, str(ROOT / "train_fsdp2.py"), str(config), *words]
        self.tasks = [
            Process(Machine(), command, folder, f"{out}.task{task}",
                    **step(task, SLURM_JOB_ID=job, SHARDYARD_PEER_TIMEOUT="10"))
            for task in range(2)
        ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("slurm"))
    write_numbered(folder / "rows.jsonl", range(40))
    return folder


@pytest.mark.soak
def test_srun_with_a_task_per_rank_trains_like_one_machine(folder: Path, ranks: RankPool) -> None:
    words = ("--training.max_steps", "4", "--model.train_from_scratch", "true")
    train(ranks, folder, "one", *words, world=2)
    run = Tasks(folder, "tasks", *words)
    assert [task.wait() for task in run.tasks] == [0, 0], run.tasks[0].text() + run.tasks[1].text()
    assert metrics(folder / "tasks") == pytest.approx(metrics(folder / "one"), rel=1e-6)
    assert "SLURM: 2 ranks on 2 node(s), one per task; they meet at 127.0.0.1:" in run.tasks[0].text()


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_task_without_launcher_ends_when_another_has_died(folder: Path, victim: int) -> None:
    words = ("--training.max_steps", "100000", "--model.train_from_scratch", "true")
    run = Tasks(folder, f"victim{victim}", *words)
    wait_for((folder / f"victim{victim}" / "metrics.jsonl").exists, *run.tasks)
    run.tasks[victim].kill()
    other = run.tasks[1 - victim]
    assert other.wait(seconds=60) == 1
    assert re.search(rf"lost contact .* node {victim} \(.*\) with rank {victim}", other.text()), other.text()
