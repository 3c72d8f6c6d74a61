"""Whole training runs on two machines of two ranks: equal to one machine, also over a machine's death."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.nodes import PYTHON, ROOT, Machine, Process, free_port, metrics, two_namespaces, wait_for
from support.ranks import RankPool
from support.whole_runs import YAML, latest_checkpoint, train, write_numbered, write_workspace

STEPS, SAVED, HALT = 7, 4, 5
WORDS = ("--training.max_steps", str(STEPS), "--model.train_from_scratch", "true")
# train_fsdp2.py with ranks that stop for good in a step of their first start: on every machine, as if a
# collective of a device waited for ever, or on the machine that is about to die alone.
HALTING = f"""
import os, sys, time
from pathlib import Path
from shardyard.cli.rank import guard, run_rank

def work():
    from shardyard.train.step import TrainStep
    run_step = TrainStep.__call__

    def halt_or_step(self, *words, step, **more):
        count = os.environ.get("SHARDYARD_START", "0") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if step == {HALT} and count == "00" and os.environ["GROUP_RANK"] in os.environ["HALT_NODES"]:
            Path(os.environ["HALT_FLAG"] + os.environ["RANK"]).touch()
            time.sleep(3600)
        return run_step(self, *words, step=step, **more)

    TrainStep.__call__ = halt_or_step
    return run_rank(sys.argv[1:])

if __name__ == "__main__":
    sys.exit(guard(work))
"""
SHARDYARD_WITH_ENTRY = """
import sys
from shardyard.cli.launch import take_launch
from shardyard.cli.train import start_ranks
words = sys.argv[2:]
launch = take_launch(words)
sys.exit(start_ranks([sys.executable, "-u", sys.argv[1], *words], launch.nproc_per_node, launch))
"""


@dataclass(frozen=True)
class Place:
    """A model, rows, and the losses of the unbroken run of four ranks on one machine."""

    folder: Path
    losses: dict[int, float]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Place:
    folder = write_workspace(tmp_path_factory.mktemp("two machines"))
    write_numbered(folder / "rows.jsonl", range(40))
    train(ranks, folder, "one", *WORDS, world=4)
    losses = metrics(folder / "one")
    assert sorted(losses) == list(range(1, STEPS + 1)) and len(set(losses.values())) == STEPS
    return Place(folder, losses)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[Machine]]:
    with two_namespaces() as machines:
        yield machines


class TwoMachines:
    """A run of 2 + 2 ranks, started as a user would start it on each machine."""

    def __init__(
        self,
        place: Place,
        out: str,
        how: str,
        machines: list[Machine],
        *options: str,
        halts: str = "",
        cache: str = "",
    ) -> None:
        self.folder, self.out, self.how = place.folder, out, how
        self.machines, self.options, self.port = machines, options, free_port()
        self.entry = place.folder / "halting.py"
        self.entry.write_text(HALTING, encoding="utf-8")
        self.halts, self.cache = halts, cache
        config = place.folder / f"{out}.yaml"
        config.write_text(YAML.format(folder=place.folder, out=place.folder / out), encoding="utf-8")
        self.words = [str(config), *WORDS]
        self.nodes = [self.start(node) for node in range(2)]

    def start(self, node: int, **env: str) -> Process:
        env |= {"HALT_NODES": self.halts, "HALT_FLAG": str(self.folder / f"{self.out}.halted.")}
        env |= {"SHARDYARD_PEER_TIMEOUT": "10"}
        return Process(self.machines[node], self.command(node), self.folder, f"{self.out}.node{node}", **env)

    def command(self, node: int) -> list[str]:
        launcher, _, way = self.how.partition(" ")
        address = self.machines[0].address
        nodes = ["--nnodes=2", *self.options]
        if way == "static":
            nodes += [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={self.port}"]
        else:
            nodes += ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{self.port}", "--rdzv_id=a"]
        nodes += ["--nproc_per_node=2"]
        words = [*self.words, *(["--model.cache_dir", f"{self.cache}{node}"] if self.cache else [])]
        if launcher == "torchrun":
            # torch goes by the name of the machine, which means nothing in a namespace.
            nodes += [f"--local_addr={self.machines[node].address}", f"--rdzv_conf=is_host={int(node == 0)}"]
            script = str(self.entry if self.halts else ROOT / "train_fsdp2.py")
            return [*PYTHON, "-m", "torch.distributed.run", *nodes, script, *words]
        if self.halts:
            return [*PYTHON, "-c", SHARDYARD_WITH_ENTRY, str(self.entry), *words, *nodes]
        return [*PYTHON, "-m", "shardyard", "train", *words, *nodes]

    def has_halted(self, ranks: tuple[int, ...]) -> bool:
        return all((self.folder / f"{self.out}.halted.{rank}").exists() for rank in ranks)

    def losses(self) -> dict[int, float]:
        return metrics(self.folder / self.out)

    def logs(self) -> str:
        return "\n---\n".join(node.text() for node in self.nodes)


def assert_equal_losses(found: dict[int, float], wanted: dict[int, float]) -> None:
    """The same ranks, batches and order of sums: only where gloo adds up may the last bits differ."""
    assert found == pytest.approx(wanted, rel=1e-6)


WAYS = ["shardyard static", "shardyard rdzv", "torchrun static", "torchrun rdzv"]
SOAK = pytest.mark.soak  # each case starts four ranks and two launchers


@SOAK
@pytest.mark.parametrize("way", WAYS)
def test_two_namespaces_train_like_one_machine(place: Place, namespaces: list[Machine], way: str) -> None:
    run = TwoMachines(place, way.replace(" ", "-"), way, namespaces)
    assert [node.wait() for node in run.nodes] == [0, 0], run.logs()
    assert_equal_losses(run.losses(), place.losses)
    assert "through cable1 (GLOO_SOCKET_IFNAME)" in run.logs() or "cable0" in run.logs()


@SOAK
def test_two_launchers_on_the_loopback_train_like_one_machine(place: Place) -> None:
    run = TwoMachines(place, "loopback", "shardyard static", [Machine(), Machine()])
    assert [node.wait() for node in run.nodes] == [0, 0], run.logs()
    assert_equal_losses(run.losses(), place.losses)


@SOAK
def test_each_machine_with_a_cache_of_its_own_prepares_its_data_by_its_first_rank(place: Place) -> None:
    cache = str(place.folder / "cache of node ")
    run = TwoMachines(place, "caches", "shardyard static", [Machine(), Machine()], cache=cache)
    assert [node.wait() for node in run.nodes] == [0, 0], run.logs()
    assert_equal_losses(run.losses(), place.losses)
    prepared = [sorted(path.name for path in Path(f"{cache}{node}").iterdir()) for node in range(2)]
    assert prepared[0] and prepared[0] == prepared[1]


@SOAK
@pytest.mark.parametrize("halts", ["1", "01"], ids=["in a collective", "no collective fails"])
def test_a_machine_dies_in_step_5_and_the_other_says_which(
    place: Place, namespaces: list[Machine], halts: str
) -> None:
    run = TwoMachines(place, f"dies-{halts}", "shardyard static", namespaces, halts=halts)
    wait_for(lambda: run.has_halted((2, 3)), *run.nodes)
    run.nodes[1].kill()
    assert run.nodes[0].wait(seconds=60) == 1
    told = run.nodes[0].text()
    assert re.search(r"^rank \d .* lost contact .* node 1 \(.*\) with ranks 2, 3$", told, re.M), told
    assert re.search(
        r"^training stopped: rank \d .* with ranks 2, 3; the other ranks were ended$", told, re.M
    )
    assert "Traceback" not in told


@SOAK
@pytest.mark.parametrize("way", ["shardyard static", "shardyard rdzv"])
def test_after_a_machines_death_the_run_goes_on_from_its_last_checkpoint(
    place: Place, namespaces: list[Machine], way: str
) -> None:
    out = way.replace(" ", "-") + "-restarts"
    run = TwoMachines(place, out, way, namespaces, "--max-restarts=2", halts="01")
    wait_for(lambda: run.has_halted((0, 1, 2, 3)), *run.nodes)
    assert latest_checkpoint(place.folder, out) == SAVED
    run.nodes[1].kill()
    wait_for(lambda: "restart 1 of 2" in run.nodes[0].text(), run.nodes[0])
    run.nodes[1] = run.start(1)
    assert [node.wait() for node in run.nodes] == [0, 0], run.logs()
    assert f"Resuming from step {SAVED}," in run.logs()
    assert_equal_losses(run.losses(), place.losses)


@SOAK
def test_torchrun_restarts_a_run_from_its_last_checkpoint(place: Place) -> None:
    """One machine: with several, torch's own launcher must see all of them restart."""
    entry = place.folder / "killed.py"
    entry.write_text(HALTING.replace("time.sleep(3600)", "os.kill(os.getpid(), 9)"), encoding="utf-8")
    config = place.folder / "torchrun-restarts.yaml"
    config.write_text(YAML.format(folder=place.folder, out=place.folder / "again"), encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "--max_restarts=1"]
    run = Process(
        Machine(), [sys.executable, *command, str(entry), str(config), *WORDS], place.folder, "again",
        HALT_NODES="0", HALT_FLAG=str(place.folder / "again.killed."),
    )  # fmt: skip
    assert run.wait() == 0, run.text()
    assert f"Resuming from step {SAVED}," in run.text()
    assert_equal_losses(metrics(place.folder / "again"), place.losses)
