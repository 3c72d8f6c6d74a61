"""Another trainer as a contestant, in an environment of its own; see ../turns.py for what it says.

    python benchmarks/peers/run_peer.py PEER TASK.json

PEER is ``trainer`` (transformers.Trainer), ``trl`` or ``trl-padding-free`` (TRL's SFTTrainer). TASK holds
``model`` and ``tokenizer`` (folders), ``rows`` (a file of peer_rows.py), ``threads`` and ``training`` (the
numbers of a run). What is not set here is the peer's own default, but for those that change the work: fp32,
no gradient checkpointing, a constant learning rate, rows in the given order, no logging and no saves.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from turns import Turns

PEERS = ("trainer", "trl", "trl-padding-free")


def settings(training: dict[str, Any], folder: str) -> dict[str, Any]:
    """Keywords that TrainingArguments and TRL's SFTConfig share."""
    return dict(
        output_dir=folder,
        per_device_train_batch_size=training["per_device_train_batch_size"],
        gradient_accumulation_steps=training["gradient_accumulation_steps"],
        max_steps=training["max_steps"],
        learning_rate=training["lr"],
        lr_scheduler_type="constant",
        weight_decay=training["weight_decay"],
        adam_beta1=training["adam_beta1"],
        adam_beta2=training["adam_beta2"],
        adam_epsilon=training["adam_epsilon"],
        max_grad_norm=training["max_grad_norm"],
        seed=training["seed"],
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        activation_checkpointing=False,  # formerly gradient_checkpointing, which TRL switches on
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def taking_turns(base: type[Trainer], turns: Turns, tokens: list[int]) -> type[Trainer]:
    """``base``, adding up the loss of a step's micro-batches and reporting each step."""

    class TurnTaking(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.ready()

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            turns.report(tokens[state.global_step - 1], self.trainer.step_loss)
            self.trainer.step_loss = 0.0

    class Reporting(base):
        def __init__(self, **keywords: Any) -> None:
            callback = TurnTaking()
            super().__init__(callbacks=[callback], **keywords)
            callback.trainer, self.step_loss = self, 0.0

        def training_step(self, *args: Any, **keywords: Any) -> Any:
            loss = super().training_step(*args, **keywords)
            self.step_loss += float(loss.detach())
            return loss

    return Reporting


def main(peer: str, task: dict[str, Any]) -> None:
    torch.set_num_threads(task["threads"])
    training = task["training"]
    rows = json.loads(Path(task["rows"]).read_text(encoding="utf-8"))
    size = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    tokens = [sum(row["tokens"] for row in rows[start : start + size]) for start in range(0, len(rows), size)]
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        common = settings(training, folder)
        if peer == "trainer":
            trainer = taking_turns(Trainer, turns, tokens)(
                model=model, args=TrainingArguments(**common), train_dataset=rows,
                data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            )  # fmt: skip
        else:
            trainer = trl_trainer(peer, model, tokenizer, rows, common, turns, tokens)
        trainer.train()


def trl_trainer(
    peer: str, model: Any, tokenizer: Any, rows: list[dict[str, Any]], common: dict[str, Any], turns: Turns,
    tokens: list[int],
) -> Trainer:  # fmt: skip
    """SFTTrainer on rows that are tokens already; its own collator pads them or joins them."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  (of the peer's environment)
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **common, max_length=None, packing=False, padding_free=peer == "trl-padding-free",
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    return taking_turns(SFTTrainer, turns, tokens)(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PEERS:
        sys.exit(__doc__)
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
