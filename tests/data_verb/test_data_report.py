"""``shardyard data report``: its counts against counts made by hand from the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_verb.runs import Folder, pair, tokens_of

ROWS = [
    pair("a", "one"),
    pair("b", ""),  # no reply
    pair("a", "one"),  # as the first
    pair("c", "x" * 200),  # longer than 64 tokens
    pair("a", "one"),
    pair("d", "four"),
]


def mixed_folder(folder: Folder) -> tuple[str, str]:
    return folder.rows("a.jsonl", ROWS), folder.rows("b.jsonl", [pair("q", str(n)) for n in range(10, 30)])


def test_counts_of_rows_by_hand(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.rows("a.jsonl", ROWS)
    folder.config(dataset={"file_name": file})
    found = folder.report(capsys)
    (source,) = found["sources"]
    lengths = [tokens_of("a", "one")] * 3 + [64, tokens_of("d", "four")]
    assert {key: source[key] for key in ("rows", "samples", "tokens", "truncated", "split", "unit")} == {
        "rows": 6, "samples": 5, "tokens": sum(lengths), "truncated": 1, "split": 0, "unit": "rows",
    }  # fmt: skip
    (dropped,) = source["dropped"].values()
    assert dropped == {"rows": 1, "first": f"{file}:2"}
    # a reply and its <eos>; the cut sample keeps its prompt of 19 tokens and trains the rest
    trained = 3 * (len("one") + 1) + (64 - len("<user>c") - 1 - len("<assistant>")) + (len("four") + 1)
    assert source["trained_tokens"] == trained
    assert source["trained_share"] == pytest.approx(trained / sum(lengths))
    assert (source["shortest"], source["longest"]) == (min(lengths), 64)
    assert source["mean"] == pytest.approx(sum(lengths) / 5)
    assert source["duplicates"] == {"of": "samples", "count": 2, "first": [0, 1]}
    assert source["lengths"]["buckets"] == [{"up_to": 32, "count": 4}, {"up_to": 64, "count": 1}]
    assert found["total"]["tokens"] == source["tokens"] and found["streaming"] is None


def test_a_layout_needs_no_number_of_ranks(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """The fewest: 2 stages x 2 tensor-parallel ranks x 3 shards, and all three of them share a sequence."""
    file = folder.rows("a.jsonl", [pair("q", str(n)) for n in range(10, 30)])
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    folder.config(dataset={"file_name": file}, training=steps)
    layout = ("--parallel.pp_size", "2", "--parallel.tp_size", "2", "--parallel.cp_size", "3")
    run = folder.report(capsys, *layout)["run"]
    assert (run["world_size"], run["data_parallel"], run["total_steps"]) == (12, 1, 10)
    run = folder.report(capsys, *layout, "--world-size", "24")["run"]
    assert (run["world_size"], run["data_parallel"], run["total_steps"]) == (24, 2, 5)
    shown = folder.run(capsys, "preview", str(folder.path / "run.yaml"), *layout)
    assert "[[10" in shown


def test_several_sets_shares_validation_and_updates(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    files = mixed_folder(folder)
    folder.config(
        dataset=[{"file_name": file} for file in files],
        mix_strategy="interleave_over",
        interleave_probs="0.5,0.5",
        eval_dataset={"file_name": files[0]},
        training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_train_epochs": 2},
    )
    found = folder.report(capsys, "--world-size", "4")
    # the larger set (20) comes whole; the other is half of the epoch too
    assert [one["samples"] for one in found["epoch"]["per_source"]] == [20, 20]
    assert found["epoch"]["samples"] == 40 and found["epoch"]["packs"] is None
    assert found["run"] == {
        "world_size": 4, "data_parallel": 4, "global_batch": 8, "updates_per_epoch": 5, "total_steps": 10,
    }  # fmt: skip
    (validation,) = found["validation"]
    assert (validation["samples"], validation["tokens"]) == (5, found["sources"][0]["tokens"])
    assert validation["also_trained"] == 5, "the validation set is the first training set"
    assert [one["first_sample"] for one in found["sources"]] == [0, 5]
    assert found["total"]["rows"] == 26 and found["total"]["samples"] == 25
    assert found["total"]["duplicates"] == {"of": "samples", "count": 2, "first": [0, 1]}


def test_packs_are_as_full_as_their_samples_allow(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [pair("q", "x" * n) for n in (12, 12, 12, 12)]  # 32 tokens each: two to a pack
    folder.config(dataset={"file_name": folder.rows("a.jsonl", rows)}, packing=True)
    packs = folder.report(capsys)["epoch"]["packs"]
    assert tokens_of("q", "x" * 12) == 32
    assert packs == {"count": 2, "capacity": 64, "samples_each": 2.0, "share_filled": 1.0}


def test_held_out_samples_are_not_in_the_epoch(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.config(dataset={"file_name": mixed_folder(folder)[1]}, val_size=6)
    found = folder.report(capsys)
    assert found["epoch"]["samples"] == 14
    assert [(one["name"], one["samples"]) for one in found["validation"]] == [("validation", 6)]
    assert found["validation"][0]["tokens"] == 6 * tokens_of("q", "10")


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_samples_that_are_trained_too_are_counted(
    streaming: bool, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = folder.rows("a.jsonl", [pair("q", str(n)) for n in range(6)])
    named = folder.rows("b.jsonl", [pair("q", "5"), pair("q", "6"), pair("q", "5"), pair("p", "1")])
    path = folder.config(
        dataset={"file_name": trained}, eval_dataset={"file_name": named}, streaming=streaming,
        training={"max_steps": 1},
    )  # fmt: skip
    (validation,) = folder.report(capsys)["validation"]
    assert validation["also_trained"] == (None if streaming else 2)
    told = "2 of them also in training" in folder.run(capsys, "report", path)
    assert told is not streaming


def test_a_held_out_copy_of_a_trained_sample_is_counted(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = [pair("q", reply) for _ in range(5) for reply in ("same", "other")]
    folder.config(dataset={"file_name": folder.rows("a.jsonl", apart)}, val_size=3)
    (validation,) = folder.report(capsys)["validation"]
    assert (validation["samples"], validation["also_trained"]) == (3, 3)
    rows = [pair("q", str(n)) for n in range(9)]
    folder.config(dataset={"file_name": folder.rows("a.jsonl", rows)}, val_size=3)
    assert folder.report(capsys)["validation"][0]["also_trained"] == 0


def document_rows() -> list[dict[str, str]]:
    return [{"text": text} for text in ("abcdef", "", "xyz", "abcdef", "xyz", "xyz")]


def test_token_streams_count_documents(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.rows("t.jsonl", document_rows())
    folder.config(
        dataset={"file_name": file}, data_manager_type="mg", append_eod=True, cutoff_len=8,
        training={"max_steps": 3},
    )  # fmt: skip
    found = folder.report(capsys)
    (source,) = found["sources"]
    inputs = (7 + 4 + 7 + 4 + 4) - 1  # every token is an input but the last
    assert (source["unit"], source["rows"], source["tokens"], source["samples"]) == (
        "documents", 6, inputs, -(-inputs // 8),
    )  # fmt: skip
    assert source["dropped"] == {"empty document": {"rows": 1, "first": f"{file}:2"}}
    assert source["duplicates"] == {"of": "documents", "count": 3, "first": [0, 2]}
    assert source["lengths"]["of"] == "documents"
    assert source["lengths"]["buckets"] == [{"up_to": 4, "count": 3}, {"up_to": 8, "count": 2}]
    assert found["run"]["total_steps"] == 3


def test_a_blend_by_megatrons_index_counts_its_sets(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        folder.rows(f"{name}.jsonl", [{"text": name * 15} for _ in range(8)]) for name in ("x", "y")
    ]  # 16 tokens a document, 128 a set
    folder.config(
        dataset={"file_name": f"0.25, {files[0]}, 0.75, {files[1]}"}, data_manager_type="mg",
        append_eod=True, cutoff_len=8, index_compat="megatron",
        training={"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
                  "disable_shuffling": False},
    )  # fmt: skip
    found = folder.report(capsys)
    assert [one["rows"] for one in found["sources"]] == [8, 8]
    assert [one["samples"] for one in found["epoch"]["per_source"]] == [2, 6]
    assert [one["duplicates"]["count"] for one in found["sources"]] == [7, 7]
    assert found["total"]["duplicates"]["count"] == 14
    assert found["total"]["samples"] == 8 and found["run"]["total_steps"] == 4
    text = folder.run(capsys, "report", str(folder.path / "run.yaml"))
    assert "all together:" in text


@pytest.mark.parametrize(("windows", "rows", "ended"), [(1, 4, False), (2, 8, False), (9, 10, True)])
def test_a_stream_is_looked_at_by_windows(
    windows: int, rows: int, ended: bool, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.rows("s.jsonl", [pair("q", str(n)) for n in range(10)])
    folder.config(dataset={"file_name": file}, streaming=True, buffer_size=4, training={"max_steps": 7})
    found = folder.report(capsys, "--windows", str(windows))
    assert (found["total"]["rows"], found["total"]["samples"]) == (rows, rows)
    assert found["total"]["tokens"] == rows * tokens_of("q", "1")
    assert ("whole epoch" in found["streaming"]) is ended
    assert found["run"]["updates_per_epoch"] is None and found["run"]["total_steps"] == 7
    assert not list((folder.path / "cache" / "stream").glob("*/*")), "windows were left behind"


def test_what_was_left_out_of_rows_is_told_with_its_first_place(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.run_data import make_tokenizer

    drops_thoughts = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    make_tokenizer(chat_template=drops_thoughts).save_pretrained(str(folder.path / "tok"))
    rows = [pair("q", "plain"), pair("q", "<think>why</think>b"), pair("q", "<think>so</think>c")]
    file = folder.rows("a.jsonl", rows)
    wanted = {"a thought left out by the chat template": {"rows": 2, "first": f"{file}:2"}}
    for streaming in (False, True):
        folder.config(
            dataset={"file_name": file}, streaming=streaming,
            training={"max_steps": 1, "disable_shuffling": False},
        )  # fmt: skip
        assert folder.report(capsys)["sources"][0]["notes"] == wanted
    other = folder.rows("b.jsonl", rows[1:])
    path = folder.config(dataset=[{"file_name": file}, {"file_name": other}])
    assert folder.report(capsys)["total"]["notes"] == {
        "a thought left out by the chat template": {"rows": 4, "first": f"{file}:2"}
    }
    text = " ".join(folder.run(capsys, "report", path).split())
    assert f"noted: a thought left out by the chat template 4 (first: {file}:2)" in text
    text = folder.run(capsys, "preview", path, "--index", "0", "2")
    assert text.count("| a thought left out") == 1


def test_the_text_says_what_the_json_says(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.rows("a.jsonl", ROWS)
    path = folder.config(dataset={"file_name": file}, packing=True, val_size=1)
    found = folder.report(capsys)
    text = folder.run(capsys, "report", path)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    source = found["sources"][0]
    assert lines[0].startswith(f"{file} (")
    assert f"samples {source['samples']}" in lines
    share = 100 * source["trained_share"]
    assert f"trained tokens {source['trained_tokens']} ({share:.1f} %)" in lines
    assert "truncated to data.cutoff_len 1" in lines
    assert "duplicate samples: 2 (first: sample 1 is the same as 0)" in lines
    assert "validation: validation 1 samples" in " ".join(lines)
    assert f"updates of the run {found['run']['total_steps']}" in lines
    assert "\x1b" not in text, "colours where the output is no terminal"


def test_too_much_to_read_for_duplicates_is_said(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardyard.data.inspect import duplicates

    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", ROWS)})
    monkeypatch.setattr(duplicates, "READ_UP_TO", 100)
    found = folder.report(capsys)
    assert found["sources"][0]["duplicates"] is None and found["total"]["duplicates"] is None
    assert "duplicates: not looked for" in folder.run(capsys, "report", path)


def test_the_report_is_that_of_the_runs_own_cache(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    from shardyard.config import load_config
    from shardyard.data.build import build_run_data
    from shardyard.data.tokenizer import load_tokenizer

    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", ROWS)})
    found = folder.report(capsys)
    made = Path(found["sources"][0]["path"])
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    config = load_config([path]).config
    data = build_run_data(config, load_tokenizer(config.model))
    assert data.parts[0].path == made
    assert before == {file.name: file.stat().st_mtime_ns for file in made.iterdir()}


REPORT_KEYS = {"streaming", "sources", "total", "epoch", "validation", "run"}


def test_the_documented_keys_are_those_of_the_json(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config(dataset={"file_name": folder.rows("a.jsonl", ROWS)}, packing=True, val_size=1)
    found = folder.report(capsys)
    assert set(found) == REPORT_KEYS
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for key in sorted(_keys(json.loads(json.dumps(found)))):
        assert f"`{key}`" in page, f"docs/data.md does not tell of {key}"


def _keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_keys, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    deeper = [_keys(item) for key, item in value.items() if key not in ("dropped", "notes")]
    return set(value).union(*deeper)
