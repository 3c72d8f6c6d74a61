"""A tiny model, small local copies of public sets, and runs of benchmarks over them."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

LM_EVAL = Path(__file__).parents[2] / ".venv" / "lm-eval"
"""Where `make setup-test` puts lm-eval, so that all other tests run without it, as most users do."""
_WORDS = "sun moon river stone glass paper iron salt wind rain tree leaf bird fish horse".split()


def add_lm_eval() -> None:
    """Let this process, a rank of the pool, import it."""
    if not LM_EVAL.is_dir():
        raise FileNotFoundError(f"{LM_EVAL} is not there: run `make setup-test`")
    sys.path.append(str(LM_EVAL))


def write_chat_model(folder: Path, **overrides: Any) -> Path:
    """A tiny random model whose byte tokenizer has a chat template."""
    from support.models import write_tiny_model
    from support.tokenizers import CHATML, byte_tokenizer

    write_tiny_model(folder, "qwen3", vocab_size=320, eos_token_id=0, bos_token_id=None, **overrides)
    byte_tokenizer(CHATML, eos="<|im_end|>", pad="<|endoftext|>").save_pretrained(folder)
    return folder


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def write_mmlu(folder: Path, subjects: tuple[str, ...] = ("stones", "birds"), rows: int = 7) -> Path:
    """test/ and dev/ in MMLU's layout."""
    draw = random.Random(3)
    for part, count in (("test", rows), ("dev", 5)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for subject in subjects:
            with (folder / part / f"{subject}_{part}.csv").open("w", newline="", encoding="utf-8") as file:
                for _ in range(count):
                    choices = [sentence(draw, draw.randint(1, 4)) for _ in range(4)]
                    csv.writer(file).writerow(
                        [f"Which is {sentence(draw, 3)}?", *choices, draw.choice("ABCD")]
                    )
    return folder


def write_gsm8k(folder: Path, rows: int = 5) -> Path:
    """main/ in gsm8k's layout."""
    draw = random.Random(4)
    (folder / "main").mkdir(parents=True)
    for part, count in (("test", rows), ("train", 6)):
        lines = [
            {
                "question": f"{sentence(draw, 4)}: {n} and 2?",
                "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
            }
            for n in range(count)
        ]
        write_jsonl(folder / "main" / f"{part}.jsonl", lines)
    return folder


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task_folder(folder: Path) -> Path:
    """lm-eval's YAML of a multiple-choice, a perplexity and a generation task, with their data."""
    folder.mkdir(parents=True)
    draw = random.Random(5)
    choices = [
        {
            "q": sentence(draw, draw.randint(2, 30)),
            "c": [sentence(draw, n) for n in (1, 2, 4)],
            "a": draw.randrange(3),
        }
        for _ in range(9)
    ]
    texts = [{"text": sentence(draw, n)} for n in (3, 40, 150, 1, 9)]
    asked = [{"q": sentence(draw, draw.randint(1, 20)), "a": "moon"} for _ in range(5)]
    for name, rows in (("choices", choices), ("texts", texts), ("asked", asked)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    common = "dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {path}}}}}\n"
    bodies = {
        "choices": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\n"
        "doc_to_target: a\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "texts": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
        "asked": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: a\n"
        "generation_kwargs: {until: ['a', '.'], max_gen_toks: 24, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n",
    }
    for name, body in bodies.items():
        data = common.format(path=folder / f"{name}.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: tiny_{name}\n{data}{body}", encoding="utf-8")
    return folder


def ours(model: Path, asked: dict[str, Any], *, parallel: str = "none") -> dict[str, Any] | None:
    """A rank's job: run benchmarks on the ranks that were started; on rank 0 the results as plain data."""
    add_lm_eval()
    from shardyard.device import detect_device, start_process_group
    from shardyard.evaluate.benchmarks import Benchmarks, read_parts, run_benchmarks
    from shardyard.evaluate.opening import open_for_tasks
    from shardyard.evaluate.results import as_json
    from shardyard.infer.opening import Choice

    device = detect_device()
    group = start_process_group(device)
    benchmarks = Benchmarks(**asked)
    parts = read_parts(benchmarks) if group.is_main else {}
    opened = open_for_tasks(Choice(str(model), parallel=parallel), group, device)  # pyright: ignore[reportArgumentType]
    results = run_benchmarks(opened, group, benchmarks, parts)
    told = (
        None
        if results is None
        else {**as_json(results), "samples": {t.name: t.samples for t in results.tasks}}
    )
    group.stop()
    return told


def theirs(model: Path, tasks: Path, names: list[str], **options: Any) -> dict[str, Any]:
    """A rank's job: the same by lm-eval's own Hugging Face backend."""
    add_lm_eval()
    import lm_eval
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm_eval.evaluator.add_env_info = lambda results: None  # it asks pip, for many seconds
    loaded = AutoModelForCausalLM.from_pretrained(model)
    lm = HFLM(pretrained=loaded, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=3, device="cpu")
    told = lm_eval.simple_evaluate(
        model=lm, tasks=names, task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0, **options,
    )  # fmt: skip
    assert told is not None
    return {"results": told["results"], "samples": told["samples"]}
