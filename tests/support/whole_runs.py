"""Real runs on ranks of the pool that write down what every step was given, and that can be killed.

What a step was given are the tokens themselves, so a row is known by what its text says and not by what an
index said.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model
from support.ranks import RankFailure, RankPool

TIMEOUT_S = 300.0
MARGIN = 3
EOS = "<|im_end|>"

YAML = """
model:
  model_name_or_path: {folder}/model
  cache_dir: {folder}/cache
data:
  template: chatml
  dataset: {folder}/rows.jsonl
  cutoff_len: 128
  preprocessing_num_workers: 1
training:
  output_dir: {out}
  per_device_train_batch_size: 1
  lr: 1e-2
  adam_epsilon: 1e-4
  num_train_epochs: 3
  save_steps: 2
  save_epochs: 0
  save_total_limit: null
  save_hf_weights: false
  warmup_ratio: 0
"""

PRETRAINING = (
    "--training.stage", "pt", "--data.data_manager_type", "mg", "--data.template", "null",
    "--data.append_eod", "--data.cutoff_len", "32",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One attention segment as a step was given it: tokens and their targets (-100: none)."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Leg:
    """One start of a run: the documents of each of its steps, over all ranks, and what rank 0 logged."""

    steps: dict[int, list[Document]]
    log: str

    @property
    def first_step(self) -> int:
        return min(self.steps)


def write_workspace(folder: Path, family: str = "qwen3") -> Path:
    """A tiny model with the byte tokenizer at ``folder/model``."""
    from support.tokenizers import byte_tokenizer

    model = write_tiny_model(folder / "model", family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    (model / "model.safetensors").unlink()
    byte_tokenizer(eos=EOS, pad="<|endoftext|>").save_pretrained(model)
    return folder


def write_numbered(file: Path, numbers: Any, column: str = "chat") -> Path:
    """Rows that say their number, of unequal length; ``column`` text makes documents of them."""
    rows: list[dict[str, str]] = []
    for n in numbers:
        reply = f"row {n} " + "x" * (n * 7 % 23)
        rows.append({"text": reply} if column == "text" else {"instruction": f"say {n}", "output": reply})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def numbers_of(tokenizer: Any, documents: list[Document]) -> list[int]:
    """The number of the row of each document, read from its targets: what was trained, not what was read."""
    found = []
    for document in documents:
        trained = tokenizer.decode([label for label in document.labels if label != -100])
        found.append(int(re.findall(r"row (\d+) ", trained)[0]))
    return found


def train(ranks: RankPool, folder: Path, out: str, *words: str, world: int = 1, leg: str = "only") -> Leg:
    """A run (or the rest of one) to its end."""
    ranks.run(
        world, rank_of_run, folder, out, leg, list(words), None, init_process_group=False, timeout_s=TIMEOUT_S
    )
    return read_leg(folder, out, leg, world)


def train_and_kill(
    ranks: RankPool,
    folder: Path,
    out: str,
    *words: str,
    world: int,
    leg: str,
    after: int,
    wait_s: float = 0.0,
) -> Leg:
    """A run whose ranks get SIGKILL ``wait_s`` seconds after all have begun ``after`` steps.

    It stops by itself, waiting for the signal, MARGIN steps later: so it never ends before. No process that
    a rank had started may stay behind.
    """
    failures: list[RankFailure] = []

    def work() -> None:
        with pytest.raises(RankFailure) as caught:
            ranks.run(
                world, rank_of_run, folder, out, leg, list(words), after + MARGIN, init_process_group=False,
                timeout_s=TIMEOUT_S,
            )  # fmt: skip
        failures.append(caught.value)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while thread.is_alive() and len(read_leg(folder, out, leg, world).steps) < after:
        assert time.monotonic() < deadline, f"{after} steps never came"
        time.sleep(0.005)
    time.sleep(wait_s)
    pids = [int((folder / f"{out}.{leg}.{rank}.pid").read_text()) for rank in range(world)]
    workers = [child for pid in pids for child in _children(pid)]
    for pid in pids if thread.is_alive() else []:
        os.kill(pid, signal.SIGKILL)
    thread.join(TIMEOUT_S)
    while left := [pid for pid in workers if _parent(pid) is not None]:
        assert time.monotonic() < deadline, f"processes {left} of killed ranks stay for ever"
        time.sleep(0.05)
    text = str(failures[0])
    assert text.count("exit code -9") + text.count("were killed") >= 1 and "Traceback" not in text, text
    return read_leg(folder, out, leg, world)


def _parent(pid: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def _children(pid: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _parent(int(p.name)) == pid]


def refusal(ranks: RankPool, folder: Path, out: str, *words: str, world: int = 1) -> str:
    """The one message with which all ranks refuse to run."""
    from shardyard.errors import UserError

    with pytest.raises(RankFailure) as caught:
        train(ranks, folder, out, *words, world=world, leg="refused")
    causes = list(caught.value.causes.values())
    assert causes and all(isinstance(cause, UserError) for cause in causes), caught.value
    assert len({str(cause) for cause in causes}) == 1, "every rank says the same"
    return str(causes[0])


def metrics(folder: Path, out: str) -> list[dict[str, Any]]:
    """All objects of a run's metrics.jsonl."""
    text = (folder / out / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def latest_checkpoint(folder: Path, out: str) -> int:
    """The step of the newest whole checkpoint, found by its manifest; 0 without one."""
    found = (folder / out / "checkpoints").glob("global_step_*/manifest.json")
    return max((int(path.parent.name.removeprefix("global_step_")) for path in found), default=0)


def rank_of_run(folder: Path, out: str, leg: str, words: list[str], halt_after: int | None) -> int:
    """One rank, as train_fsdp2.py would start it, which writes down what its steps are given."""
    from shardyard.config import load_config
    from shardyard.monitor import setup_logging
    from shardyard.train import run

    rank = os.environ["RANK"]
    own = f"{out}.{leg}.{rank}"
    os.chdir(folder)
    setup_logging(int(rank))
    handler = logging.FileHandler(folder / f"{own}.log")
    logging.getLogger("shardyard").addHandler(handler)
    _write_down_steps(folder / f"{own}.steps", halt_after)
    (folder / f"{own}.pid").write_text(str(os.getpid()))
    path = folder / f"{own}.yaml"
    path.write_text(YAML.format(folder=folder, out=folder / out))
    return run(load_config([str(path), "--model.train_from_scratch", "true", *words]))


def _write_down_steps(file: Path, halt_after: int | None) -> None:
    """Wrap the step of this process: a line of documents before each; number ``halt_after`` is not made."""
    from shardyard.train.step import TrainStep

    make_step = TrainStep.__call__
    out = file.open("w", encoding="utf-8")
    begun: list[int] = []

    def write_and_step(self: Any, micro_batches: Any, *, step: int, lr: float) -> Any:
        documents = []
        for batch in micro_batches:
            if batch.sample_ids:
                pairs = zip(
                    batch.input_ids.split(batch.doc_lens), batch.labels.split(batch.doc_lens), strict=True
                )
                documents += [[ids.tolist(), labels.tolist()] for ids, labels in pairs]
        out.write(json.dumps([step, documents]) + "\n")
        out.flush()
        begun.append(step)
        if len(begun) == halt_after:
            time.sleep(TIMEOUT_S)
        return make_step(self, micro_batches, step=step, lr=lr)

    TrainStep.__call__ = write_and_step  # type: ignore[method-assign]  # this process is one rank of one run


def steps_begun(folder: Path, out: str, leg: str, world: int) -> int:
    """How many steps all ranks of a run that is under way have begun."""
    return len(read_leg(folder, out, leg, world).steps)


def read_leg(folder: Path, out: str, leg: str, world: int) -> Leg:
    """The steps that all ranks have begun."""
    of_ranks: list[dict[int, list[Document]]] = []
    for rank in range(world):
        file = folder / f"{out}.{leg}.{rank}.steps"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        of_ranks.append({step: [Document(*pair) for pair in documents] for step, documents in read})
    common = sorted(set.intersection(*map(set, of_ranks)))
    log = folder / f"{out}.{leg}.0.log"
    return Leg(
        {step: [document for steps in of_ranks for document in steps[step]] for step in common},
        log.read_text(encoding="utf-8") if log.exists() else "",
    )
