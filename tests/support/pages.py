"""How much of a model's weight files a rank touches at start, beside what it keeps of them.

Two ways to touch a file are counted together: pages that are resident in a mapping of it (/proc/self/smaps)
and pages that read calls cover. Each page counts once however often it is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.training import Recipe

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Touched:
    """Bytes: of file pages that a rank had touched once its weights were read, in mappings (``mapped``) and
    by read calls (``read``), and of its tensors in the files (``share``).
    """

    mapped: int
    read: int
    share: int

    @property
    def ratio(self) -> float:
        return (self.mapped + self.read) / self.share


def resident(folder: Path) -> int:
    """Bytes of mapped pages of the files in ``folder`` that this process has touched."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = len(words) > 5 and Path(line.split(maxsplit=5)[5]).parent == folder
        elif inside and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


def touched_at_start(folder: Path, recipe: Recipe) -> Touched:
    """On each rank: build the model in ``folder`` (bf16 files) as ``recipe`` lays it out."""
    import torch
    import torch.distributed as dist

    from shardyard import models
    from shardyard.config import ModelConfig, ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device
    from shardyard.models.weight_files import WeightFiles
    from shardyard.parallel import build_meshes, local

    mapped: list[int] = []
    pages: set[tuple[int, int]] = set()
    close, preadv = WeightFiles.close, os.preadv

    def look_first(files: Any) -> None:
        mapped.append(resident(folder.resolve()))
        close(files)

    def counted(descriptor: int, buffers: Any, at: int) -> int:
        count = preadv(descriptor, buffers, at)
        pages.update((descriptor, page) for page in range(at // PAGE, -(-(at + count) // PAGE)))
        return count

    WeightFiles.close, os.preadv = look_first, counted
    options, parallel = ModelConfig(model_name_or_path=str(folder)), ParallelConfig(**recipe.parallel)
    meshes = build_meshes(resolve_layout(parallel, dist.get_world_size()), "cpu")
    config = models.load_model_config(options, folder)
    placement = models.Placement(parallel, meshes, Device("cpu"))
    built = models.build_model(options, config, folder, placement, seed=1)
    held = sum(local(parameter).numel() for parameter in built.model.parameters())
    return Touched(sum(mapped), len(pages) * PAGE, held * torch.bfloat16.itemsize)


def write_large_model(folder: Path, *, experts: bool = False, layers: int = 4) -> Path:
    """About 80 MB in bf16, of a family's shapes but not its values: rows of 2 and 6 KiB, as large models'."""
    import torch
    import transformers
    from safetensors.torch import save_file

    hf: Any = transformers
    sizes: dict[str, Any] = dict(
        vocab_size=8000, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    if experts:
        config = hf.Qwen3MoeConfig(
            **sizes, intermediate_size=512, moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2
        )
    else:
        config = hf.Qwen3Config(**sizes, intermediate_size=1536)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 3:  # experts stand one by one in files
            prefix, gate_up = name.rpartition(".")[0], "gate_up" in name
            for expert in range(tensor.shape[0]):
                parts = tensor[expert].chunk(2) if gate_up else (tensor[expert],)
                for part, leaf in zip(
                    parts, ("gate_proj", "up_proj") if gate_up else ("down_proj",), strict=True
                ):
                    tensors[f"{prefix}.{expert}.{leaf}.weight"] = part
        else:
            tensors[name] = tensor
    full = {name: torch.full(tensor.shape, 0.01, dtype=torch.bfloat16) for name, tensor in tensors.items()}
    save_file(full, folder / "model.safetensors", {"format": "pt"})
    return folder
