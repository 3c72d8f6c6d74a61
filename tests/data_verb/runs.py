"""A folder with a tokenizer of bytes, rows and a YAML, and the verb run on it in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from support.run_data import CHAT, make_tokenizer

from shardyard.cli import main


class Folder:
    """``path`` holds the tokenizer in ``tok``; ``config`` writes ``run.yaml``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_tokenizer(chat_template=CHAT).save_pretrained(str(path / "tok"))

    def rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Write rows as jsonl; the file's path."""
        file = self.path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    def config(self, *, training: Mapping[str, Any] | None = None, **data: Any) -> str:
        """Write the YAML of a run on ``data``; its path."""
        values = {
            "model": {
                "model_name_or_path": str(self.path / "no-model-is-here"),
                "tokenizer_name_or_path": str(self.path / "tok"),
                "cache_dir": str(self.path / "cache"),
            },
            "data": {"dataset_dir": str(self.path), "cutoff_len": 64, **data},
            "training": {
                "output_dir": str(self.path / "out"),
                "stage": "pt" if data.get("data_manager_type") == "mg" else "sft",
                "disable_shuffling": True,
                **(training or {}),
            },
        }
        file = self.path / "run.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(file)

    def run(self, capsys: Any, *words: str) -> str:
        """What ``shardyard data WORDS`` prints to stdout."""
        code = main(["data", *words])
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    def report(self, capsys: Any, *words: str) -> dict[str, Any]:
        """The report of ``run.yaml`` as JSON."""
        return json.loads(self.run(capsys, "report", str(self.path / "run.yaml"), "--json", *words))

    def refused(self, capsys: Any, *words: str) -> str:
        """The error of ``shardyard data WORDS``, exit code 2."""
        code = main(["data", *words])
        output = capsys.readouterr()
        assert code == 2 and output.out == ""
        errors = [part for part in output.err.split("error: ")[1:]]
        assert len(errors) == 1 and "Traceback" not in output.err
        return errors[0].rstrip("\n")


def pair(question: str, reply: str) -> dict[str, str]:
    """An Alpaca row; its sample reads ``<user>QUESTION<eos><assistant>REPLY<eos>``."""
    return {"instruction": question, "output": reply}


PROMPT = len("<user>") + len("<assistant>") + 1
"""Tokens of a sample beside its question and reply, but for the last ``<eos>``."""


def tokens_of(question: str, reply: str) -> int:
    """Tokens of the sample of such a row: one a byte, ``<eos>`` one."""
    return PROMPT + len(question.encode()) + len(reply.encode()) + 1
