"""``shardyard data preview``: which samples it shows, and how."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from data_verb.runs import Folder, pair, tokens_of
from support.tokenizers import byte_tokenizer

from shardyard.data.inspect import Style
from shardyard.data.inspect.show import visible

ROWS = [pair(f"q{n}", "abcdefghij"[: n + 1]) for n in range(8)]


def shown(text: str) -> list[int]:
    """The numbers of the samples in a preview."""
    return [int(number) for number in re.findall(r"^sample (\d+) \|", text, re.MULTILINE)]


@pytest.fixture
def path(folder: Folder) -> str:
    return folder.config(dataset={"file_name": folder.rows("a.jsonl", ROWS)})


def test_a_sample_reads_as_it_is_trained(
    folder: Folder, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = folder.run(capsys, "preview", path, "--index", "2").splitlines()
    file = folder.path / "a.jsonl"
    tokens = len("<user>q2") + 1 + len("<assistant>abc") + 1  # one a byte, <eos> one
    assert lines[1] == f"sample 2 | {file} | {file}:3 | {tokens} tokens, 4 trained (16.7 %)"
    assert lines[2] == "<user>q2<eos><assistant>[[abc<eos>]]"


def test_ids_and_targets(folder: Folder, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = folder.run(capsys, "preview", path, "--index", "0", "--ids").splitlines()
    table = [line.split() for line in lines if line[:1] == " "]
    # the last prompt token has the reply's only letter as its target, that letter has <eos>
    tokens = [row[3] for row in table]
    assert tokens == [repr(c) for c in "<user>q0"] + ["'<eos>'"] + [repr(c) for c in "<assistant>a"] + [
        "'<eos>'"
    ]
    targets = [row[2] for row in table]
    letter, eos = table[-2][1], table[-1][1]
    assert targets == ["-"] * (len(table) - 3) + [letter, eos, "-"]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ((), [0, 1, 2]),
        (("--index", "5", "1"), [5, 1]),
        (("--index=5,1",), [5, 1]),
        (("--longest", "2"), [7, 6]),
        (("--shortest", "3"), [0, 1, 2]),
        (("--most-trained", "1"), [7]),
        (("--least-trained=2",), [0, 1]),
        (("--shortest", "1", "--longest", "1"), [7, 0]),
        (("--truncated", "2"), []),
    ],
)
def test_which_samples(
    words: tuple[str, ...], numbers: list[int], folder: Folder, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(folder.run(capsys, "preview", path, *words)) == numbers


def test_random_samples_depend_on_the_seed_alone(
    folder: Folder, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = (shown(folder.run(capsys, "preview", path, "--random", "5")) for _ in range(2))
    other = shown(folder.run(capsys, "preview", path, "--random", "5", "--training.seed", "9"))
    assert first == again and len(set(first)) == 5
    assert first != other and len(set(other)) == 5


def test_training_order_is_the_samplers(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    from shardyard.data.order import epoch_order

    path = folder.config(
        dataset={"file_name": folder.rows("a.jsonl", ROWS)},
        training={"disable_shuffling": False, "seed": 5},
    )
    assert shown(folder.run(capsys, "preview", path)) == epoch_order(8, 5, 0)[:3].tolist()


def test_truncated_samples_are_known_each(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    # the second row fills the cut-off exactly and is not cut
    fits = 64 - tokens_of("q", "")
    rows = [pair("q", "a"), pair("q", "x" * fits), pair("q", "x" * (fits + 1)), pair("q", "x" * 500)]
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", rows)})
    text = folder.run(capsys, "preview", path, "--truncated", "9")
    assert shown(text) == [2, 3]
    assert text.count("| truncated") == 2
    assert "| truncated" not in folder.run(capsys, "preview", path, "--index", "1")


def test_of_a_split_row_only_the_cut_sample_is_flagged() -> None:
    from support.tokenizers import QWEN3_LIKE

    from shardyard.data.dropped import Dropped
    from shardyard.data.encode import Encoder
    from shardyard.data.store import FLAG_TRUNCATED
    from shardyard.data.types import Conversation, Message

    turns = []
    for reply in ("<think>a</think>b", "<think>c</think>" + "d" * 80):
        turns += [Message("user", "q"), Message("assistant", reply)]
    samples = Encoder(byte_tokenizer(QWEN3_LIKE), cutoff_len=60).encode(Conversation(tuple(turns)))
    assert not isinstance(samples, Dropped)
    assert list(samples.flags) == [0, FLAG_TRUNCATED]


def test_one_source_only(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    files = [folder.rows("a.jsonl", ROWS), folder.rows("b.jsonl", [pair("z", "x" * 30)] * 2)]
    path = folder.config(dataset=[{"file_name": file} for file in files])
    assert shown(folder.run(capsys, "preview", path, "--longest", "2", "--source", files[0])) == [7, 6]
    assert shown(folder.run(capsys, "preview", path, "--source", "b.jsonl")) == [8, 9]
    assert shown(folder.run(capsys, "preview", path, "--longest", "2")) == [8, 9]
    text = folder.run(capsys, "preview", path, "--index", "9")
    assert f"{files[1]}:2" in text
    fault = folder.refused(capsys, "preview", path, "--source", "c.jsonl")
    assert "no data set of this run" in fault and files[0] in fault
    assert "means several" in folder.refused(capsys, "preview", path, "--source", "jsonl")


def test_the_place_of_a_row_survives_dropped_and_split_rows(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [pair("a", ""), pair("b", "1"), pair("c", ""), pair("d", "2"), pair("e", "3")]
    file = folder.rows("a.jsonl", rows)
    path = folder.config(dataset={"file_name": file}, preprocessing_batch_size=2, preprocessing_num_workers=2)
    text = folder.run(capsys, "preview", path, "--index", "0", "1", "2")
    assert re.findall(r"\| (\S+:\d+) \|", text) == [f"{file}:2", f"{file}:4", f"{file}:5"]


def test_what_is_held_out_is_shown_by_number_only(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", ROWS)}, val_size=3)
    trained = shown(folder.run(capsys, "preview", path, "--longest", "99"))
    held_out = sorted(set(range(8)) - set(trained))
    assert len(held_out) == 3
    text = folder.run(capsys, "preview", path, "--index", *map(str, range(8)))
    told = re.findall(r"^sample (\d+) .*\| kept for validation$", text, re.MULTILINE)
    assert [int(number) for number in told] == held_out


def test_the_samples_of_a_pack(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [pair("q", "x" * 12), pair("q", "y" * 40), pair("q", "z" * 12)]  # 32, 60 and 32 tokens
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", rows)}, packing=True)
    assert shown(folder.run(capsys, "preview", path, "--pack", "0")) == [0, 2]
    assert shown(folder.run(capsys, "preview", path, "--pack", "1", "0")) == [1, 0, 2]
    assert "packs 0 to 1" in folder.refused(capsys, "preview", path, "--pack", "2")
    assert "set data.packing" in folder.refused(
        capsys, "preview", path, "--data.packing", "false", "--pack", "0"
    )


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("compat", [None, "megatron"])
def test_windows_show_where_documents_end(
    reset: bool, compat: str | None, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.rows("t.jsonl", [{"text": "abc"}, {"text": "defgh"}, {"text": "ij"}])
    path = folder.config(
        dataset={"file_name": file}, data_manager_type="mg", append_eod=True, cutoff_len=12,
        reset_attention_mask=reset, index_compat=compat,
        training={"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
                  "disable_shuffling": compat is None},
    )  # fmt: skip
    text = folder.run(capsys, "preview", path, "--index", "0")
    lines = text.splitlines()[2:-1]
    ends = [number for number, line in enumerate(lines) if line == "---- a document ends here ----"]
    texts = "\n".join(lines).split("\n---- a document ends here ----\n")
    assert len(ends) == len(texts) - 1 >= 1
    plain = [piece.replace("[[", "").replace("]]", "") for piece in texts]
    whole = {"abc<eos>", "defgh<eos>", "ij<eos>"}
    assert set(plain[:-1]) <= whole and any(one.startswith(plain[-1]) for one in whole)
    if compat is None:
        assert plain == ["abc<eos>", "defgh<eos>", "ij"]
        # a window's first token is no target of it; with reset neither is a document's first
        first = "[[defgh<eos>]]" if not reset else "d[[efgh<eos>]]"
        assert texts[:2] == ["a[[bc<eos>]]", first]


def test_a_stream_numbers_samples_over_its_windows(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.config(
        dataset={"file_name": folder.rows("a.jsonl", ROWS)}, streaming=True, buffer_size=3,
        training={"max_steps": 1},
    )  # fmt: skip
    text = folder.run(capsys, "preview", path, "--windows", "2", "--longest", "1")
    assert shown(text) == [5] and "[[abcdef<eos>]]" in text
    assert text.startswith("the first 2 window(s) of 3 rows of the stream")
    assert "--windows reads more" in folder.refused(capsys, "preview", path, "--index", "3")
    assert "streams do not keep it" in folder.refused(capsys, "preview", path, "--truncated", "1")


def test_rows_cannot_write_to_the_terminal(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "[red]x[/red] \x1b[2J\x07\u202eevil\r\n\tend"
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", [pair("q", nasty)])})
    text = folder.run(capsys, "preview", path)
    assert "[[[red]x[/red] \\x1b[2J\\x07\\u202eevil\\r\n\tend<eos>]]" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize("text", ["a\tb\nc", "日本語 émoji 🙂", "[bold]no markup[/bold]"])
def test_text_without_control_characters_is_shown_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_colour_on_a_terminal_only(
    folder: Folder, path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "<assistant>\x1b[1;32ma<eos>\x1b[0m" in folder.run(capsys, "preview", path, "--index", "0")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "<assistant>[[a<eos>]]" in folder.run(capsys, "preview", path, "--index", "0")


def test_colour_is_given_anew_on_each_line() -> None:
    assert Style(colour=True).trained("a\n\nb") == "\x1b[1;32ma\x1b[0m\n\n\x1b[1;32mb\x1b[0m"


def test_long_samples_are_cut_for_the_eye(
    folder: Folder, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = folder.run(capsys, "preview", path, "--index", "0", "--max-tokens", "6")
    left = tokens_of("q0", "a") - 6
    assert f"<user>\n... ({left} more tokens; --max-tokens shows more)\n" in text


def test_a_packed_file_of_preprocessing_can_be_looked_at(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardyard.cli import main

    file = folder.rows("a.jsonl", ROWS)
    prefix = folder.path / "made"
    words = ["--input", file, "--tokenizer-name-or-path", str(folder.path / "tok")]
    words += ["--handler-name", "AlpacaStyleInstructionHandler", "--output-prefix", str(prefix)]
    assert main(["preprocess", *words, "--prompt-type", "default"]) == 0
    capsys.readouterr()
    path = folder.config(
        dataset={"file_name": str(prefix)}, data_manager_type="mg", training={"stage": "sft"}
    )
    found = folder.report(capsys)
    assert (found["total"]["unit"], found["total"]["samples"]) == ("packed samples", 8)
    assert shown(folder.run(capsys, "preview", path, "--longest", "1")) == [7]


def test_help(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    for words in (["--help"], ["preview", "-h"]):
        text = folder.run(capsys, *words)
        assert text.startswith("usage: shardyard data report FILE")
    assert not (Path(folder.path) / "cache").exists()
