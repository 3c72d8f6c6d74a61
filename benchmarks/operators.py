"""Each operator's implementations beside the family's own code, and one whole layer with and without them.

    python benchmarks/operators.py [--tokens 1024] [--repeats 11] [--cpu-time] [--only SmolLM2] [--json FILE]

Milliseconds are of one forward and backward, the median of ``--repeats`` after one that is not counted, the
implementations of an operation taking turns. ``kept`` are the bytes that autograd keeps between the two, each
storage once, inputs and parameters left out. The last rows are a decoder layer: `false` is the family's own
code throughout, `auto` what a run takes. Two documents, of two thirds and of one third of the tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from turns import machine, print_table

from shardyard.config import OptimizationConfig
from shardyard.device import detect_device
from shardyard.ops import DOCUMENTS_ATTENTION
from shardyard.ops.apply import OPERATIONS, apply_operators
from shardyard.ops.registry import Example, Operation, Site, Situation

_CONFIGS: Any = transformers  # several keywords reach a config through **kwargs

SHAPES: dict[str, Callable[[], Any]] = {
    "SmolLM2-135M": lambda: _CONFIGS.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        num_hidden_layers=1, vocab_size=8,
    ),
    "Qwen3-0.6B": lambda: _CONFIGS.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, num_hidden_layers=1, vocab_size=8,
    ),
    "Qwen3-30B-A3B, 8 of its experts": lambda: _CONFIGS.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_hidden_layers=1, num_experts=8, num_experts_per_tok=2, vocab_size=8,
    ),
}  # fmt: skip


class Figure(NamedTuple):
    """One row of the table."""

    shape: str
    operation: str
    implementation: str
    milliseconds: float
    kept: int


def both_ways(function: Callable[..., Any], inputs: Iterable[torch.Tensor], more: tuple[Any, ...]) -> Any:
    """A function that runs forward and backward once, and the bytes kept between them."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def once() -> None:
        outputs = function(*leaves, *more)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, wanted, [torch.ones_like(out) for out in outputs], allow_unused=True)

    return once, kept_bytes(lambda: function(*leaves, *more), leaves)


def kept_bytes(forward: Callable[[], Any], but: Iterable[torch.Tensor]) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    del outputs
    for tensor in but:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def take_turns(ways: dict[str, Callable[[], None]], options: Any, synchronize: Callable[[], None]) -> Any:
    """Median seconds of each."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats + 1):
        for name, way in ways.items():
            synchronize()
            started = clock()
            way()
            synchronize()
            seconds[name].append(clock() - started)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def of_operation(
    shape: str, operation: Operation, site: Site, situation: Situation, options: Any, synchronize: Any
) -> list[Figure]:
    with torch.device(situation.device):
        example: Example = operation.example(site, situation)
    runs = {operation.plain: both_ways(example.eager, example.inputs, ())}
    for implementation in operation.implementations:
        if implementation.missing(situation) or implementation.unsuited(site, situation):
            continue
        runs[implementation.name] = both_ways(implementation.run(site), example.inputs, example.more)
    medians = take_turns({name: way for name, (way, _) in runs.items()}, options, synchronize)
    name = f"{operation.name} ({site.name.rpartition('.')[2]})"
    return [Figure(shape, name, key, 1e3 * medians[key], kept) for key, (_, kept) in runs.items()]


def of_layer(shape: str, config: Any, situation: Situation, options: Any, synchronize: Any) -> list[Figure]:
    """The first decoder layer under each setting of all switches at once."""
    runs = {}
    for wish in (False, "auto"):
        torch.manual_seed(0)
        with torch.device(situation.device):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=DOCUMENTS_ATTENTION, dtype=situation.dtype
            )
        switches: Any = {operation.switch: wish for operation in OPERATIONS}
        apply_operators(model, OptimizationConfig(**switches), situation)
        model.train()
        runs[str(wish).lower()] = _layer_both_ways(model, config, situation)
    medians = take_turns({name: way for name, (way, _) in runs.items()}, options, synchronize)
    return [Figure(shape, "decoder layer", key, 1e3 * medians[key], kept) for key, (_, kept) in runs.items()]


def _layer_both_ways(model: Any, config: Any, situation: Situation) -> Any:
    layer, tokens = model.model.layers[0], situation.tokens
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=situation.dtype, device=situation.device)
    lens = (tokens - tokens // 3, tokens // 3)
    positions = torch.cat([torch.arange(n) for n in lens])[None].to(situation.device)
    rotary = model.model.rotary_emb(hidden, positions)

    def forward(hidden: torch.Tensor, *_: torch.Tensor) -> Any:
        out = layer(hidden, position_embeddings=rotary, position_ids=positions, doc_lens=lens)
        return out[0] if isinstance(out, tuple) else out

    parameters = list(layer.parameters())
    leaf = hidden.requires_grad_()

    def once() -> None:
        torch.autograd.grad(forward(leaf).sum(), [leaf, *parameters], allow_unused=True)

    return once, kept_bytes(lambda: forward(leaf), [leaf, *parameters])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's, for a busy machine")
    parser.add_argument("--only", help="shapes whose name holds this")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    device = detect_device()
    situation = Situation(device.torch_device, device.default_param_dtype, tokens=options.tokens)
    figures: list[Figure] = []
    for shape, make in SHAPES.items():
        if options.only and options.only not in shape:
            continue
        config = make()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=DOCUMENTS_ATTENTION
            )
        for operation in OPERATIONS:
            for site in {site.kind: site for site in operation.find(model).sites}.values():
                figures += of_operation(shape, operation, site, situation, options, device.synchronize)
        figures += of_layer(shape, config, situation, options, device.synchronize)
    report(figures, situation, options)
    return 0


def report(figures: list[Figure], situation: Situation, options: Any) -> None:
    print(machine())
    print(f"{situation.tokens} tokens, {str(situation.dtype).removeprefix('torch.')}, {situation.device}")
    rows, plain = [], figures[0]
    for figure in figures:
        if (figure.shape, figure.operation) != (plain.shape, plain.operation):
            plain = figure  # each operation's first row is the family's own code
        ratio = f"{plain.milliseconds / figure.milliseconds:.2f} x"
        kept = f"{figure.kept / 2**20:.2f}"
        rows.append([*figure[:3], f"{figure.milliseconds:.2f}", ratio, kept])
    print_table(["shape", "operation", "runs", "ms, both ways", "speed", "kept, MiB"], rows)
    if options.json:
        options.json.write_text(json.dumps([figure._asdict() for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
