"""Prompts from files, what is asked of the sampling, and files that are complete or absent."""

from __future__ import annotations

import json

import pytest

from shardyard.cli.jsonl_output import JsonlOutput
from shardyard.errors import UserError
from shardyard.infer.asked import Asked, sampling_of
from shardyard.infer.prompts import prompts_of_file, prompts_of_text, prompts_of_words
from shardyard.infer.types import Sampling

MODELS_OWN = Sampling(max_new_tokens=40, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)


def test_lines_are_prompts_and_text_is_one(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffeins\r\nzwei\u2028drei\n".encode())
    assert [(row.where, row.prompt) for row in prompts_of_file(file, "lines")] == [
        (f"{file}:1", "eins"),
        (f"{file}:2", "zwei\u2028drei"),
    ]
    (row,) = prompts_of_text(b"a\n\nb\n", "text", "standard input")
    assert row.prompt == "a\n\nb"


def test_a_row_keeps_its_other_keys_and_asks_for_its_own_sampling():
    line = {"id": 7, "prompt": "p", "temperature": 0.5, "stop": "x", "n": 2, "seed": 3, "top_k": None}
    (row,) = prompts_of_text(json.dumps(line).encode(), "jsonl", "f")
    assert row.asked == Asked(temperature=0.5, stop=("x",), seed=3) and row.n == 2 and row.kept == line


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("", "f.jsonl:2: the line is empty"),
        ("{", "f.jsonl:2: not JSON"),
        ('{"prompt": "a", "x": NaN}', "f.jsonl:2: not JSON: NaN is no number"),
        ("[" * 100_000, "f.jsonl:2: not JSON"),
        ('"text"', "f.jsonl:2: a JSON object is wanted"),
        ("{}", "a row has prompt or messages; found nothing"),
        ('{"text": "a"}', "a row has prompt or messages; found text"),
        ('{"prompt": "a", "messages": []}', "both are there"),
        ('{"prompt": " "}', "f.jsonl:2: the prompt is empty"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": 5}', "prompt is text"),
        ('{"messages": []}', "at least one message"),
        ('{"prompt": "a", "tools": {}}', "tools is a list"),
        ('{"prompt": "a", "text": "b"}', "the answer writes text; give the row's key another name"),
        ('{"prompt": "a", "num_beams": 2}', "num_beams is one for all rows"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: 'hot' is not a number"),
        ('{"prompt": "a", "top_k": true}', "top_k: True is not a whole number"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k: 1.5 is not a whole number"),
        ('{"prompt": "a", "n": 0}', "n: 0 is out of range"),
        ('{"prompt": "a", "seed": -1}', "seed: -1 is out of range"),
        ('{"prompt": "a", "seed": 99999999999999999999}', "seed: the number is too large"),
        ('{"prompt": "a", "stop": ["b", ""]}', "none of them empty"),
    ],
)
def test_a_bad_row_is_named_by_its_line(line, part):
    with pytest.raises(UserError) as caught:
        prompts_of_text(f'{{"prompt": "ok"}}\n{line}\n'.encode(), "jsonl", "f.jsonl")
    assert part in str(caught.value) and str(caught.value).startswith("f.jsonl:2: ")


def test_files_that_hold_no_prompt(tmp_path):
    empty = tmp_path / "e.txt"
    empty.write_bytes(b"")
    with pytest.raises(UserError, match="the file is empty"):
        prompts_of_file(empty, "lines")
    with pytest.raises(UserError, match=r"f:2: not UTF-8 \(byte 0xff\)"):
        prompts_of_text(b"a\n\xff\n", "lines", "f")
    with pytest.raises(UserError, match="No such file"):
        prompts_of_file(tmp_path / "none.txt", "lines")
    with pytest.raises(UserError, match="--prompt 2: the prompt is empty"):
        prompts_of_words(["a", ""])


@pytest.mark.parametrize(
    ("asked", "section", "expected"),
    [
        (Asked(), {}, (40, 0.6, 0.9, 20)),
        (Asked(), {"max_new_tokens": 512, "do_sample": None}, (512, 0.6, 0.9, 20)),
        (Asked(), {"do_sample": False}, (40, 0.0, 1.0, 0)),
        (Asked(temperature=0.0), {"do_sample": True}, (40, 0.0, 1.0, 0)),
        (Asked(do_sample=False), {"temperature": 0.7}, (40, 0.0, 1.0, 0)),
        (Asked(temperature=0.7), {"do_sample": False}, (40, 0.7, 0.9, 20)),
        (Asked(top_k=5), {"do_sample": False, "top_p": 0.5}, (40, 0.6, 0.5, 5)),
        (Asked(max_new_tokens=3), {"max_new_tokens": 9, "temperature": 1.5}, (3, 1.5, 0.9, 20)),
    ],
)
def test_words_win_over_the_yaml_and_that_over_the_model(asked, section, expected):
    _, found = sampling_of(asked, section, MODELS_OWN, frozenset({1}))
    assert (found.max_new_tokens, found.temperature, found.top_p, found.top_k) == expected
    assert found.repetition_penalty == 1.1 and found.stop_ids == {1}


def test_greedy_unless_somebody_asks_to_sample():
    _, found = sampling_of(Asked(seed=3, max_new_tokens=4), None, Sampling(), frozenset())
    assert found.is_greedy
    _, found = sampling_of(Asked(do_sample=True), None, Sampling(), frozenset())
    assert found.temperature == 1.0


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (Asked(max_new_tokens=0), "sampling: max_new_tokens: 0 is out of range"),
        (Asked(temperature=-1.0), "temperature"),
        (Asked(do_sample=True, temperature=0.0), "contradicts do_sample"),
        (Asked(logprobs=21), "logprobs: 21"),
        (Asked(num_beams=0), "num_beams: 0"),
    ],
)
def test_values_out_of_range_are_named(asked, part):
    with pytest.raises(UserError) as caught:
        sampling_of(asked, None, Sampling(), frozenset())
    assert part in str(caught.value)


def test_an_output_is_complete_or_absent(tmp_path):
    path = tmp_path / "o.jsonl"
    output = JsonlOutput(path, overwrite=False)
    output.write("{}")
    assert not path.exists()
    output.abandon()
    assert list(tmp_path.iterdir()) == []
    output.write("[]")
    assert output.finish() == 1 and path.read_text() == "[]\n"
    with pytest.raises(UserError, match="it is there already"):
        JsonlOutput(path, overwrite=False).check()
    with pytest.raises(UserError, match="no folder"):
        JsonlOutput(tmp_path / "no" / "o.jsonl", overwrite=False).check()
    with pytest.raises(UserError, match="that is a folder"):
        JsonlOutput(tmp_path, overwrite=True).check()
