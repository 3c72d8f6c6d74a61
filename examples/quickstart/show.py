"""Show what a quick start run has learnt: its falling loss, the exported model, and three answers.

    python examples/quickstart/show.py output/quickstart [--questions 3] [--seed 0]

Draws the loss of the run's metrics.jsonl as a PNG, then asks the exported model, with plain transformers,
questions drawn by ``--seed`` from the rows it was trained on. The exit code is 1 if the loss did not fall or
an answer differs from its row in a single character.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import rows as data

MAX_NEW_TOKENS = 60


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Show what a quick start run has learnt.")
    parser.add_argument("run", type=Path, help="the run's output_dir")
    parser.add_argument("--questions", type=int, default=3, help="how many rows to ask for (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="which rows: each seed draws others (default 0)")
    options = parser.parse_args(argv)

    losses = read_losses(options.run / "metrics.jsonl")
    if not (options.run / "config.json").is_file():
        raise SystemExit(f"{options.run} holds no exported model yet: resume the run to its end")
    first, last = losses[0][1], losses[-1][1]
    plot = draw(losses, options.run / "loss.png")
    print(f"\nloss            {first:.3f} at step {losses[0][0]} -> {last:.3f} at step {losses[-1][0]}")
    print(f"plot            {plot}")
    print(f"exported model  {options.run} (Hugging Face format)\n")

    rows = data.alpaca_rows()
    asked = random.Random(options.seed).sample(rows, min(options.questions, len(rows)))
    right = ask(options.run, asked)
    print(f"{right} of {len(asked)} answers are right, letter by letter")
    return 0 if right == len(asked) and last < first else 1


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step in a run's metrics.jsonl."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: has the run finished? `make train` runs it")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = [(int(record["step"]), float(record["loss"])) for record in records if "loss" in record]
    if not losses:
        raise SystemExit(f"{path} holds no step")
    return losses


def draw(losses: list[tuple[int, float]], path: Path) -> Path:
    """Plot the loss over the steps into ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], color="tab:blue", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (mean over trained tokens)", title="Quick start: the loss falls")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def ask(model_dir: Path, asked: list[dict[str, str]]) -> int:
    """Print the model's greedy answer to each row's question; return how many equal the row's output."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True).eval()
    right = 0
    for row in asked:
        answer = generate(model, tokenizer, data.question(row))
        same = answer == row["output"]
        right += same
        print(f"Q  {data.question(row)}\nA  {answer}")
        print("   right\n" if same else f"   WRONG, the row says: {row['output']}\n")
    return right


def generate(model: Any, tokenizer: Any, question: str) -> str:
    """The model's most likely reply to one question, up to the token that ends its turn."""
    import torch

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    reply = output[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(reply, skip_special_tokens=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
