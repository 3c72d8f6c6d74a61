"""megatron-core's own data sets, run in a process of their own.

Importing megatron.core there pulls in torch's inductor and sets environment variables, which no other test of
this process should see. ``run_megatron`` sends jobs (plain values) and gets each one's arrays back.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

EOD = 0
VOCABULARY = 1000


def run_megatron(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, np.ndarray]]:
    """Do the jobs in one process, in order; ``folder`` takes the exchange files."""
    from support.peer_process import ask  # this file runs as a script too, where tests are not on the path

    results: list[dict[str, np.ndarray]] = [{} for _ in jobs]
    for key, array in ask(__file__, jobs, folder).items():
        number, name = key.split(".", 1)
        results[int(number)][name] = array
    return results


class Tokenizer:
    """What GPTDataset asks a tokenizer for. Without ``pad``: its pad is -1, which no text holds."""

    vocab_size = VOCABULARY
    eod = EOD
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012  (never changed)


def read(job: dict[str, Any]) -> dict[str, Any]:
    """All that IndexedDataset gives of the set ``prefix``."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(job["prefix"], multimodal=job.get("multimodal", False))
    items = [data[index] for index in range(len(data))]
    modes = []
    if job.get("multimodal"):
        modes = [mode for _, mode in items]
        items = [tokens for tokens, _ in items]
    return {
        "lengths": data.sequence_lengths.copy(),  # the map goes away with the data set
        "document_indices": data.document_indices.copy(),
        "tokens": np.concatenate(items),
        "modes": np.array(modes),
    }


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Write ``documents`` (of sequences of ids) with IndexedDatasetBuilder, then append ``others``."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    multimodal = job.get("multimodal", False)
    builder = IndexedDatasetBuilder(job["prefix"] + ".bin", getattr(np, job["dtype"]), multimodal)
    for document in job.get("documents", []):
        for number, sequence in enumerate(document):
            builder.add_item(torch.tensor(sequence), mode=number % 3)
        builder.end_document()
    for other in job.get("others", []):
        builder.add_index(other)
    builder.finalize(job["prefix"] + ".idx")
    return {}


def samples(job: dict[str, Any]) -> dict[str, Any]:
    """The first ``take`` samples of the train, valid or test set that the builder makes."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=job["seed"],
        sequence_length=job["cutoff_len"],
        blend=(job["prefixes"], job["weights"]),
        split=job["split"],
        tokenizer=Tokenizer(),
        reset_position_ids=job.get("reset", False),
        reset_attention_mask=job.get("reset", False),
        eod_mask_loss=job.get("eod_mask_loss", False),
        create_attention_mask=False,
    )
    data = BlendedMegatronDatasetBuilder(GPTDataset, job["sizes"], lambda: True, config).build()[job["part"]]
    taken = [data[index] for index in range(min(job["take"], len(data)))]
    names = ("tokens", "labels", "position_ids", "loss_mask")
    result = {name: np.stack([sample[name].numpy() for sample in taken]) for name in names}
    return {**result, "length": np.array(len(data))}


def blend(job: dict[str, Any]) -> dict[str, Any]:
    """The compiled helper's own blend."""
    from megatron.core.datasets import helpers

    size = job.get("size") or sum(job["weights"])
    of_set, in_set = np.zeros(size, np.int16), np.zeros(size, np.int64)
    if job.get("size"):
        helpers.build_blending_indices(
            of_set, in_set, np.array(job["weights"]), len(job["weights"]), size, False
        )
    else:
        helpers.build_exhaustive_blending_indices(
            of_set, in_set, np.array(job["weights"]), len(job["weights"])
        )
    return {"of_set": of_set, "in_set": in_set}


def main(request: str, answer: str) -> None:
    """Do what the file ``request`` lists and save the arrays in ``answer``."""
    warnings.simplefilter("ignore")  # what megatron-core says about kernels that are not installed
    tasks = {"read": read, "build": build, "samples": samples, "blend": blend}
    arrays = {}
    for number, job in enumerate(json.loads(Path(request).read_text(encoding="utf-8"))):
        arrays |= {f"{number}.{name}": array for name, array in tasks[job["do"]](job).items()}
    np.savez(answer, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
