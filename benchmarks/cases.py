"""What the benchmarks train: a run's words, for the three built-in cases or for a YAML of the user's.

    --case alpaca|glaive|pretrain --model FOLDER --data FOLDER [overrides]
    FILE.yaml [overrides]
    [overrides]                    the quick start's (examples/quickstart/make_assets.py writes its rows)

The cases read alpaca_en_demo.json, glaive_toolcall_en_demo.json and c4_demo.jsonl in the folder of data, in
file order: four rows a micro-batch, one micro-batch a step, fp32, a constant learning rate. The defaults of
Shardyard decide the rest, since a first run has no others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart" / "tune_tiny_qwen3.yaml"
SMALLEST = REPOSITORY / "examples" / "fsdp2" / "smollm2" / "tune_smollm2_135m_512_fsdp2_cpu.yaml"
_COMMON = [
    "training.disable_shuffling=true", "training.per_device_train_batch_size=4", "training.lr=1e-4",
    "training.gradient_accumulation_steps=1", "parallel.param_dtype=fp32",
]  # fmt: skip
CASES = {
    "alpaca": ("alpaca_en_demo.json", {}, ["data.cutoff_len=512"]),
    "glaive": (
        "glaive_toolcall_en_demo.json",
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}},
        ["data.cutoff_len=1024", "data.template=chatml", "data.mask_history=true"],
    ),
    "pretrain": (
        "c4_demo.jsonl", {}, ["training.stage=pt", "data.cutoff_len=512", "data.data_manager_type=mg"],
    ),
}  # fmt: skip
"""Name -> file, what else its entry says, and the words of the case."""


def add_case_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, help="a built-in case; needs --model and --data")
    parser.add_argument("--model", type=Path, help="the case's model, a Hugging Face folder")
    parser.add_argument("--data", type=Path, help="the folder of the case's file of rows")


def words_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str], *, steps: int, folder: str
) -> list[str]:
    """The words of a run of ``steps`` updates that writes into ``folder``, saves nothing and recomputes
    nothing; ``rest`` is what the parser left: a YAML, if any, and overrides, which win over the case's.
    """
    if options.case is None:
        words = rest if rest and rest[0].endswith((".yaml", ".yml")) else [str(QUICKSTART), *rest]
        case: list[str] = []
    else:
        if options.model is None or options.data is None:
            parser.error("--case needs --model and --data")
        file, entry, own = CASES[options.case]
        entry = {"file_name": str(options.data.resolve() / file), **entry}
        case = [f"model.model_name_or_path={options.model.resolve()}", f"data.dataset={json.dumps(entry)}"]
        case, words = [*case, *_COMMON, *own], [str(SMALLEST), *rest]
    return [
        words[0], *case,
        "training.lr_scheduler_type=constant", "training.warmup_ratio=0", "training.save_steps=0",
        "training.save_epochs=0", "training.save_hf_weights=false", "parallel.recompute=false",
        *words[1:], f"training.output_dir={folder}/run", f"training.max_steps={steps}",
    ]  # fmt: skip
