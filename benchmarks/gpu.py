"""One prepared script for one accelerator: tokens per second, share of the peak and memory of Qwen3 shapes.

    python benchmarks/gpu.py --out FOLDER              # under four minutes on an H200-class GPU
    python benchmarks/gpu.py --out FOLDER --tiny       # the same on a CPU in small, to know that it works

Weights are drawn at random, rows are invented: conversations of very unequal length, in bf16 (fp32 on a CPU)
over fp32 weights, with AdamW. Each row of the first table is one way to train the same rows: ``torch`` is a
plain loop over transformers' own model, padded, under autocast, with torch's fused AdamW; the others are
whole runs of Shardyard, with the settings that are named. MFU counts what the mathematics needs
(shardyard/models/flops.py), set against the best matrix product, measured here first. The second table sets
every operator that can run on this device beside the family's own code.

Both tables go to FOLDER/gpu.md as they grow, every figure to FOLDER/gpu.json. Ways that there is no time for
(``--seconds``), no memory, or no compiler, are rows with the reason. The script was written on a machine
without an accelerator: only ``--tiny`` has been run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases import SMALLEST
from peer_rows import rows_of
from transformers import AutoModelForCausalLM, Qwen3Config
from turns import installed_versions, machine, peak_resident_bytes, print_table

from shardyard.config import load_config
from shardyard.models.flops import model_flops
from shardyard.models.scratch import initialise_from_seed
from shardyard.train import run

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30
SEED = 42


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return dict(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-8B, 16 of 36 layers": _qwen3(4096, 12288, 16, 32, tied=False),
    "tiny": _qwen3(64, 128, 2, 4, tied=True) | dict(vocab_size=1024, num_key_value_heads=2, head_dim=16),
}
"""All 36 layers of the 8B in fp32 with AdamW are 131 GB before the first activation: 16 show its shapes."""
_OPERATORS = tuple(
    f"optimization.{switch}"
    for switch in ("use_fused_rmsnorm", "use_fused_rotary_pos_emb", "use_fused_swiglu", "use_flash_attn")
)
TORCH = "torch: padded, autocast, AdamW"
WAYS: dict[str, list[str]] = {
    "as it comes": [],
    "the family's operators": [f"{switch}=false" for switch in _OPERATORS],
    "fused operators": [f"{switch}=true" for switch in _OPERATORS],
    "compiled blocks": ["optimization.compile=block"],
    "a row a forward": ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=8"],
    "recompute full": ["parallel.recompute=full"],
}
PLAN = (
    ("Qwen3-0.6B", (TORCH, *WAYS)),
    ("Qwen3-1.7B", (TORCH, "as it comes", "fused operators", "compiled blocks")),
    ("Qwen3-8B, 16 of 36 layers", (TORCH, "as it comes", "recompute full")),
)
TINY_PLAN = (("tiny", (TORCH, *WAYS)),)
ROWS_A_STEP = 8


@dataclass
class Row:
    """One way to train one model. ``why`` says why there are no figures."""

    model: str
    way: str
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    peak_gib: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    why: str = ""

    def cells(self) -> list[str]:
        if self.why:
            return [self.model, self.way, self.why, "", "", ""]
        losses = f"{self.first_loss:.4f} -> {self.last_loss:.4f}"
        return [
            self.model, self.way, f"{self.tokens_per_second:,.0f}", f"{self.mfu:.3f}", f"{self.peak_gib:.1f}",
            losses,
        ]  # fmt: skip


class Bench:
    """What all rows share, and the files that they go to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.perf_counter()
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        self.dtype = torch.float32 if self.on_cpu else torch.bfloat16
        self.rows: list[Row] = []
        self.operators: list[list[str]] = []
        self.peak = matrix_peak(self.device, self.dtype, 256 if options.tiny else 8192)

    def write(self) -> None:
        """Everything known so far."""
        name = machine() if self.on_cpu else torch.get_device_module(self.device).get_device_name()
        lines = [
            f"{name}; " + ", ".join(f"{package} {of}" for package, of in installed_versions().items()),
            f"matrix products in {self.dtype}: {self.peak / 1e12:.3g} TFLOP/s; {self.seconds():.0f} s in all",
            "",
        ]  # fmt: skip
        head = ["model", "way", "tokens/s", "MFU", "peak GiB", "loss"]
        print_table(head, [row.cells() for row in self.rows], lines.append)
        lines.append("")
        head = ["operator", "implementation", "ms, forward and backward", "the family's own", "ratio"]
        print_table(head, self.operators, lines.append)
        figures = {"head": lines[:2], "rows": [asdict(row) for row in self.rows], "operators": self.operators}
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self.options.out / "gpu.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def synchronise(self) -> None:
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def fresh(self) -> None:
        """Give back what the last row held, and begin to measure memory anew."""
        gc.collect()
        if not self.on_cpu:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Since `fresh`; on a CPU the most resident memory of the process so far, other rows' too."""
        return (peak_resident_bytes() if self.on_cpu else torch.accelerator.max_memory_allocated()) / GIB


def matrix_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second of the fastest of 20 products of ``size`` x ``size``."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(_timed(lambda: a @ b, device, repeat=20))


def _timed(work: Callable[[], object], device: torch.device, *, repeat: int) -> list[float]:
    seconds = []
    for _ in range(repeat + 2):  # two warm up
        if device.type != "cpu":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def invented_rows(path: Path, count: int, longest: int) -> Path:
    """Conversations whose lengths are spread as those of instruction data are: many short, a few long."""
    generator = random.Random(SEED)

    def text(words: int) -> str:
        return " ".join("".join(generator.choices("abcdefghij", k=3)) for _ in range(words))

    rows = []
    for _ in range(count):
        words = min(longest, int(generator.lognormvariate(0, 0.9) * longest / 6) + 4)
        rows.append({"instruction": text(words // 4 + 1), "output": text(words)})
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def model_folder(root: Path, name: str) -> Path:
    """config.json of the shape, and the quick start's tokenizer; no weights."""
    assets = root / "assets"
    if not assets.exists():
        script = REPOSITORY / "examples" / "quickstart" / "make_assets.py"
        subprocess.run([sys.executable, str(script), str(assets)], check=True, stdout=sys.stderr)
    folder = root / name.split(",")[0]
    folder.mkdir()
    Qwen3Config(**MODELS[name], max_position_embeddings=4096).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((assets / "model" / file).read_bytes())
    return folder


def words_of(
    options: argparse.Namespace, folder: Path, rows: Path, out: Path, own: Sequence[str]
) -> list[str]:
    return [
        str(SMALLEST), f"model.model_name_or_path={folder}", "model.train_from_scratch=true",
        f"model.cache_dir={rows.parent}/cache", f"data.dataset={rows}", f"data.cutoff_len={options.longest}",
        f"training.output_dir={out}", f"training.max_steps={1 + options.steps}", f"training.seed={SEED}",
        "training.disable_shuffling=true", "training.lr_scheduler_type=constant", "training.warmup_ratio=0",
        "training.save_steps=0", "training.save_epochs=0", "training.save_hf_weights=false",
        f"training.per_device_train_batch_size={ROWS_A_STEP}", "training.gradient_accumulation_steps=1", *own,
    ]  # fmt: skip


def measure_model(bench: Bench, name: str, ways: Sequence[str], root: Path) -> None:
    """All rows of a model; each is written before the next begins."""
    folder = model_folder(root, name)
    data = invented_rows(
        root / f"{folder.name}.json", ROWS_A_STEP * (1 + bench.options.steps), bench.options.longest // 3
    )
    rows = rows_of(load_config(words_of(bench.options, folder, data, root / "unused", ())).config)
    steps = [rows[start : start + ROWS_A_STEP] for start in range(0, len(rows), ROWS_A_STEP)]
    with torch.device("meta"):
        flops = model_flops(AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder)))
    assert flops is not None
    operations = [
        flops.training([row["tokens"] for row in step], sum(y != -100 for row in step for y in row["labels"]))
        for step in steps
    ]
    tokens = [sum(row["tokens"] for row in step) for step in steps]
    longest_row = 0.0
    for number, way in enumerate(ways):
        row, began = Row(name, way), bench.seconds()
        bench.rows.append(row)
        if began + 1.2 * longest_row > bench.options.seconds:
            row.why = "no time was left"
            continue
        bench.fresh()
        try:
            if way == TORCH:
                seconds, losses = train_plainly(bench, folder, steps)
            else:
                words = words_of(bench.options, folder, data, root / f"{folder.name}-{number}", WAYS[way])
                seconds, losses = train_ours(bench, words)
        except Exception as error:  # one way that fails must not take the others' figures along
            row.why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        else:
            row.tokens_per_second = median(t / s for t, s in zip(tokens[1:], seconds[1:], strict=True))
            row.mfu = median(o / s for o, s in zip(operations[1:], seconds[1:], strict=True)) / bench.peak
            row.peak_gib, row.first_loss, row.last_loss = bench.peak_gib(), losses[0], losses[-1]
        longest_row = max(longest_row, bench.seconds() - began)
        bench.write()
        print(" | ".join(row.cells()), file=sys.stderr, flush=True)


def train_ours(bench: Bench, words: list[str]) -> tuple[list[float], list[float]]:
    """(seconds, loss) of each step of a whole run."""
    seconds: list[float] = []
    losses: list[float] = []
    last = [0.0]

    def observe(record: Any) -> None:
        bench.synchronise()
        now = time.perf_counter()
        if record is not None:
            seconds.append(now - last[0])
            losses.append(record.loss)
        last[0] = now

    run(load_config(words), observe=observe)
    return seconds, losses


def train_plainly(
    bench: Bench, folder: Path, steps: list[list[dict[str, Any]]]
) -> tuple[list[float], list[float]]:
    """The loop that one would write: transformers' own model, rows padded, autocast, torch's fused AdamW."""
    config = Qwen3Config.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    initialise_from_seed(model, SEED, bench.device)
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    defaults = load_config([str(SMALLEST)]).config.training
    for group in groups[:1]:
        group["weight_decay"] = defaults.weight_decay
    optimizer = torch.optim.AdamW(
        groups,
        lr=defaults.lr,
        betas=(defaults.adam_beta1, defaults.adam_beta2),
        eps=defaults.adam_epsilon,
        fused=True,
    )
    seconds, losses = [], []
    for step in steps:
        bench.synchronise()
        start = time.perf_counter()
        batch = {name: tensor.to(bench.device) for name, tensor in padded(step).items()}
        with nullcontext() if bench.on_cpu else torch.autocast(bench.device.type, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), defaults.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        bench.synchronise()
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def padded(step: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """[B, S] of each, S the longest row."""
    longest = max(len(row["input_ids"]) for row in step)

    def stacked(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[key] + [filler] * (longest - len(row[key])) for row in step])

    mask = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in step]
    )
    return {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", -100), "attention_mask": mask}


def measure_operators(bench: Bench, name: str) -> None:
    """Each implementation that can run here beside the family's own code, on the model's shapes."""
    from shardyard.ops import DOCUMENTS_ATTENTION
    from shardyard.ops.apply import OPERATIONS
    from shardyard.ops.registry import Situation

    situation = Situation(bench.device, bench.dtype, tokens=64 if bench.options.tiny else 4096)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**MODELS[name]), dtype=bench.dtype, attn_implementation=DOCUMENTS_ATTENTION
        )
    for operation in OPERATIONS:
        sites = {site.kind: site for site in reversed(operation.find(model).sites)}
        for site in sites.values():
            with torch.device(bench.device):
                example = operation.example(site, situation)
            eager = run_both_ways(bench, example.eager, example.inputs)
            for implementation in operation.implementations:
                reason = implementation.missing(situation) or implementation.unsuited(site, situation)
                if reason is None:
                    ours = run_both_ways(bench, implementation.run(site), example.inputs, example.more)
                    figures = [f"{1e3 * ours:.3f}", f"{1e3 * eager:.3f}", f"{eager / ours:.2f} x"]
                else:
                    figures = [f"not here: {reason}", f"{1e3 * eager:.3f}", ""]
                bench.operators.append([f"{operation.name} ({site.name})", implementation.name, *figures])


def run_both_ways(
    bench: Bench, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], more: tuple[Any, ...] = ()
) -> float:
    """Median seconds of a forward and a backward."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def once() -> None:
        outputs = function(*leaves, *more)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, wanted, [torch.ones_like(out) for out in outputs], allow_unused=True)

    return median(_timed(once, bench.device, repeat=3 if bench.options.tiny else 20))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--seconds", type=float, default=215.0, help="no way to train is begun after these")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each way, one before them apart")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest row")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows")
    options = parser.parse_args()
    if options.tiny:
        options.longest = min(options.longest, 96)
    bench = Bench(options)
    plan = TINY_PLAN if options.tiny else PLAN
    with tempfile.TemporaryDirectory() as root:
        measure_operators(bench, plan[0][0])
        for name, ways in plan:
            measure_model(bench, name, ways, Path(root))
    bench.write()
    print((options.out / "gpu.md").read_text(encoding="utf-8"))
    return 0 if all(row.tokens_per_second for row in bench.rows if row.way in (TORCH, "as it comes")) else 1


if __name__ == "__main__":
    sys.exit(main())
