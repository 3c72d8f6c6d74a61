"""Real tokens per second and peak memory of Shardyard and of ``transformers.Trainer``, on one machine.

    python benchmarks/throughput.py FILE.yaml [overrides] [--steps 5] [--warm-up 1]

Both train the model of FILE on the same rows in the same order, with the same batch size, optimizer, learning
rate and dtype (fp32 on a CPU), each as one process. They take turns step by step, so that whatever else the
machine does hits both, and the idle one waits for a message. Padding is not counted as tokens. The losses are
compared too: equal losses say that both did the same work.

Without FILE it is the quick start's (examples/quickstart/make_assets.py writes its model and rows first).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "tune_tiny_qwen3.yaml"


@dataclass(frozen=True)
class Step:
    seconds: float
    tokens: int
    loss: float


@dataclass
class Contestant:
    """A trainer in a process of its own and what it has reported."""

    name: str
    process: Any
    pipe: Any
    steps: list[Step] = field(default_factory=list)
    peak_bytes: int = 0

    @classmethod
    def start(cls, name: str, work: Callable[[Connection, list[str]], None], words: list[str]) -> Contestant:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, words), name=name)
        process.start()
        theirs.close()
        contestant = cls(name, process, ours)
        contestant.receive()  # ready for its first step
        return contestant

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            sys.exit(f"{self.name} ended with exit code {self.process.exitcode}; its message stands above")

    def take_turn(self) -> None:
        self.pipe.send("go")
        step, self.peak_bytes = self.receive()
        self.steps.append(step)

    def finish(self) -> None:
        self.pipe.send("go")
        self.process.join()


class Turns:
    """A trainer's side of the pipe. The clock runs from a "go" to the report of the step."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._started = 0.0

    def ready(self) -> None:
        self._pipe.send("ready")
        self._wait()

    def report(self, tokens: int, loss: float) -> None:
        step = Step(time.perf_counter() - self._started, tokens, loss)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._pipe.send((step, peak))
        self._wait()

    def _wait(self) -> None:
        self._pipe.recv()
        self._started = time.perf_counter()


def run_shardyard(pipe: Connection, words: list[str]) -> None:
    """The whole of ``shardyard.train.run``, observed step by step."""
    from shardyard.config import load_config
    from shardyard.monitor import StepRecord
    from shardyard.train import run

    turns = Turns(pipe)

    def take_turns(record: StepRecord | None) -> None:
        if record is None:
            turns.ready()
        else:
            turns.report(record.tokens, record.loss)

    run(load_config(words), observe=take_turns)


def run_transformers(pipe: Connection, words: list[str]) -> None:
    """``transformers.Trainer`` on the rows that Shardyard's data layer made, in the order of its sampler."""
    import torch
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainerCallback

    from shardyard.config import load_config
    from shardyard.data.tokenizer import load_tokenizer

    config = load_config(words).config
    tokenizer = load_tokenizer(config.model)
    rows = _rows_in_order(config, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path, dtype=torch.float32)
    turns = Turns(pipe)

    class TurnTaking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.report(trainer.tokens, trainer.loss)
            trainer.tokens, trainer.loss = 0, 0.0

    class Counting(Trainer):
        tokens, loss = 0, 0.0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens += int(inputs["attention_mask"].sum())
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.loss += float(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        trainer = Counting(
            model=model,
            args=_training_arguments(config, folder),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            callbacks=[TurnTaking()],
        )
        trainer.train()


def _rows_in_order(config: Any, tokenizer: Any) -> list[dict[str, list[int]]]:
    from shardyard.data.build import build_run_data

    training = config.training
    data = build_run_data(config, tokenizer)
    ids: list[int] = []
    cursor = 0
    for _ in range(training.max_steps):
        batch = data.sampler.global_batch_at(cursor)
        ids += batch.indices.tolist()
        cursor = batch.end
    samples = [data.samples[index] for index in ids]
    # The model shifts the labels itself; a sample's are shifted already.
    return [
        {"input_ids": sample.input_ids.tolist(), "labels": [-100, *sample.labels[:-1].tolist()]}
        for sample in samples
    ]


def _training_arguments(config: Any, folder: str) -> Any:
    from transformers import TrainingArguments

    training = config.training
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_steps=training.max_steps,
        learning_rate=training.lr,
        lr_scheduler_type="constant",
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        dataloader_num_workers=training.dataloader_num_workers,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=training.seed,
    )


def print_table(contestants: Sequence[Contestant], warm_up: int) -> None:
    print(f"\n{'':<22}{'tokens/s':>10}{'s/step':>10}{'tokens/step':>13}{'peak MiB':>10}{'loss':>10}")
    speeds, peaks = [], []
    for contestant in contestants:
        timed = contestant.steps[warm_up:]
        speeds.append(median(step.tokens / step.seconds for step in timed))
        peaks.append(contestant.peak_bytes / 2**20)
        print(
            f"{contestant.name:<22}{speeds[-1]:>10.1f}{median(s.seconds for s in timed):>10.3f}"
            f"{median(s.tokens for s in timed):>13.0f}{peaks[-1]:>10.0f}{timed[-1].loss:>10.4f}"
        )
    ours, theirs = contestants
    apart = max(abs(a.loss - b.loss) for a, b in zip(ours.steps, theirs.steps, strict=True))
    print(
        f"{ours.name} / {theirs.name}: {speeds[0] / speeds[1]:.2f} x the tokens per second, "
        f"{peaks[0] / peaks[1]:.2f} x the peak memory; the losses differ by at most {apart:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    options, words = parser.parse_known_args()
    if find_spec("accelerate") is None:
        sys.exit("transformers.Trainer needs the package accelerate, which is not installed")
    if not words or not words[0].endswith((".yaml", ".yml")):
        words = [str(QUICKSTART), *words]
    with tempfile.TemporaryDirectory() as folder:
        words += [
            f"training.output_dir={folder}/run", f"training.max_steps={options.warm_up + options.steps}",
            "training.lr_scheduler_type=constant", "training.warmup_ratio=0", "training.save_steps=0",
            "training.save_epochs=0", "training.save_hf_weights=false", "parallel.recompute=false",
        ]  # fmt: skip
        contestants = [
            Contestant.start("shardyard", run_shardyard, words),
            Contestant.start("transformers.Trainer", run_transformers, words),
        ]
        for number in range(options.warm_up + options.steps):
            # The first of a pair changes, so that neither always runs on the other's warm caches.
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                contestant.take_turn()
        for contestant in contestants:
            contestant.finish()
    print_table(contestants, options.warm_up)


if __name__ == "__main__":
    main()
