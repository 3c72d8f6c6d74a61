"""Full counts: memory against the size of the input, and megatron-core as the reader of what was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from data_indexed.megatron_peer import run_megatron
from support.tokenizers import byte_tokenizer

from shardyard.data.preprocess import write_documents
from shardyard.data.sources import resolve_datasets

PEAK = """
import json, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.tokenizers import byte_tokenizer
from shardyard.data.preprocess import Job, run_job
from shardyard.data.preprocess.run import Pace
from shardyard.data.sources import resolve_datasets
path = Path(sys.argv[2])
job = Job("text", resolve_datasets(str(path), "."), path.with_suffix(""), append_eod=True, pace=Pace(2),
          save_every=1.0, memo=path.with_name("memo.json"))
run_job(job, byte_tokenizer())
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(peaks))
"""


def peak_kib(folder, megabytes):
    """Peak memory of the reading process and of the largest tokenising one."""
    path = folder / f"rows{megabytes}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(megabytes * 100):
            file.write(json.dumps({"text": f"{number} " + "tea in the sea " * 660}) + "\n")
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tests), str(path)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_memory_does_not_grow_with_the_input(tmp_path):
    small, large = peak_kib(tmp_path, 10), peak_kib(tmp_path, 100)
    for before, after in zip(small, large, strict=True):
        assert after - before < 48 * 1024, (small, large)


@pytest.mark.soak
def test_megatron_reads_what_was_preprocessed(tmp_path):
    texts = [f"document {number} " + "tea " * (number % 11) for number in range(200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = byte_tokenizer()
    entry = resolve_datasets(str(path), ".")[0]
    write_documents(entry, tokenizer, tmp_path / "out", append_eod=True, workers=2)
    seen = run_megatron([{"do": "read", "prefix": str(tmp_path / "out")}], tmp_path)[0]
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert seen["tokens"].tolist() == [token for document in expected for token in document]
    assert seen["lengths"].tolist() == [len(document) for document in expected]
    assert seen["document_indices"].tolist() == list(range(201))
