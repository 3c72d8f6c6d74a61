"""``shardyard generate`` in a rank, on a tiny model with a byte-level tokenizer."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = ["The cat sat", "on", "a mat and then it slept"]


def write_chat_model(folder: Path, **overrides: Any) -> Path:
    """A random Qwen3 that knows every byte, with a ChatML template."""
    from support.models import write_tiny_model
    from support.tokenizers import CHATML, byte_tokenizer

    tokenizer = byte_tokenizer(CHATML)
    write_tiny_model(folder, "qwen3_tied", vocab_size=len(tokenizer), **overrides)
    tokenizer.save_pretrained(folder)
    return folder


def generated(words: Sequence[str], stdin: str | None = None) -> tuple[int | str, str, str]:
    """(exit code or the user's mistake, stdout, stderr) of the verb, in this rank."""
    from shardyard.cli.generate import read_generate, run_generate
    from shardyard.errors import UserError

    if stdin is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            job = read_generate(words)
            assert job is not None
            code: int | str = run_generate(job)
        except UserError as error:
            code = str(error)
    return code, out.getvalue(), err.getvalue()


def prompt_ids(folder: Path, text: str) -> list[int]:
    """Of a raw prompt."""
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def drawn_by_hand(folder: Path, ids: Sequence[int], count: int, seed: int, **how: float) -> list[int]:
    """Temperature, top-k and top-p by plain torch operations, and the draws of a generator of ``seed``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(ids)
    for _ in range(count):
        with torch.no_grad():
            scores = model(torch.tensor([tokens]), use_cache=False).logits[0, -1] / how["temperature"]
        kept = scores.topk(int(how["top_k"])).values[-1]
        scores = torch.where(scores < kept, -torch.inf, scores)
        ranked, order = scores.sort()
        out = ranked.softmax(-1).cumsum(-1) <= 1 - how["top_p"]
        out[-1] = False
        scores[order[out]] = -torch.inf
        tokens.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
    return tokens[len(ids) :]


def beams_by_transformers(folder: Path, ids: Sequence[int], count: int, beams: int, n: int) -> list[Any]:
    """[(ids of the answer, score)] of transformers' own generate, by its keyword arguments."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([list(ids)]), num_beams=beams, num_return_sequences=n, max_new_tokens=count,
        do_sample=False, output_scores=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    rows = found.sequences[:, len(ids) :].tolist()
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))
