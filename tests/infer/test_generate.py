"""generate: answers are those of plain loops, in the order of the prompts, alone or together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.generation import (
    TEXTS,
    beams_by_transformers,
    drawn_by_hand,
    generated,
    prompt_ids,
    write_chat_model,
)
from support.inference import greedy_by_hand

COUNT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("generate") / "m")


def run(ranks: Any, *words: object, stdin: str | None = None, size: int = 1) -> Any:
    """Of rank 0."""
    told = ranks.run(size, generated, [str(word) for word in words], stdin, init_process_group=False)
    return told[0]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_is_answered_as_by_a_plain_loop(ranks, model, tmp_path, size):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    asked = [{"prompt": text, "id": number} for number, text in enumerate(TEXTS)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
    words = ["--model", model, "--prompt-file", prompts, "--output", output, "--raw", "--logprobs", "2"]
    code, out, err = run(ranks, *words, "--max-new-tokens", COUNT, size=size)
    assert (code, out) == (0, "") and f"{output}: 3 answers" in err
    expected = greedy_by_hand(model, [prompt_ids(model, text) for text in TEXTS], COUNT)
    found = rows(output)
    assert [(row["id"], row["prompt"]) for row in found] == list(enumerate(TEXTS))
    assert [row["tokens"] for row in found] == expected
    for row in found:
        assert row["finish_reason"] == "length" and row["prompt_tokens"] and "seed" not in row
        for told in row["logprobs"]:
            assert told["logprob"] == pytest.approx(told["top"][0]["logprob"]) and len(told["top"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.jsonl", "p.jsonl"]


def test_one_prompt_is_streamed_as_text_up_to_a_stop_text(ranks, model):
    from transformers import AutoTokenizer

    words = ["--model", model, "--raw", "--max-new-tokens", COUNT]
    (expected,) = greedy_by_hand(model, [prompt_ids(model, TEXTS[0])], COUNT)
    text = AutoTokenizer.from_pretrained(model).decode(expected, skip_special_tokens=True)
    assert run(ranks, *words, "--prompt", TEXTS[0])[:2] == (0, text + "\n")
    assert run(ranks, *words, stdin=TEXTS[0] + "\n")[:2] == (0, text + "\n")
    stop = next(character for character in text[1:] if character != "\ufffd")
    cut = text[: text.index(stop)]
    assert run(ranks, *words, "--prompt", TEXTS[0], "--stop", stop)[:2] == (0, cut + "\n")


def test_drawn_answers_are_those_of_their_seeds_alone_and_together(ranks, model):
    how = {"temperature": 1.7, "top_k": 20, "top_p": 0.8}
    options = ["--temperature", 1.7, "--top-k", 20, "--top-p", 0.8, "--seed", 11, "-n", 2]
    prompts = [word for text in TEXTS for word in ("--prompt", text)]
    words = ["--model", model, "--raw", "--max-new-tokens", COUNT, *options]
    code, out, _ = run(ranks, *words, *prompts)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [(row["answer"], row["seed"]) for row in found] == [
        (0, 11), (1, 12), (0, 13), (1, 14), (0, 15), (1, 16)
    ]  # fmt: skip
    for row in found:
        ids = prompt_ids(model, row["prompt"])
        assert row["tokens"] == drawn_by_hand(model, ids, COUNT, row["seed"], **how)


@pytest.mark.parametrize("size", [1, 2])
def test_beams_are_transformers(ranks, model, size):
    words = ["--model", model, "--raw", "--max-new-tokens", COUNT, "--num-beams", 3, "-n", 2]
    code, out, _ = run(ranks, *words, "--prompt", TEXTS[0], "--prompt", TEXTS[1], size=size)
    found = [json.loads(line) for line in out.splitlines()]
    expected = [
        answer
        for text in TEXTS[:2]
        for answer in beams_by_transformers(model, prompt_ids(model, text), COUNT, 3, 2)
    ]
    assert code == 0 and [row["tokens"] for row in found] == [ids for ids, _ in expected]
    assert [row["score"] for row in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_a_prompt_is_a_chat_where_the_model_has_a_template(ranks, model, tmp_path):
    file = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    code, out, _ = run(ranks, "--model", model, "--prompt-file", file, "--max-new-tokens", COUNT)
    (row,) = [json.loads(line) for line in out.splitlines()]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert code == 0 and row["messages"] == chat
    assert [row["tokens"]] == greedy_by_hand(model, [prompt_ids(model, text)], COUNT)
    said = run(ranks, "--model", model, "--prompt", "hi", "--system", "s", "--max-new-tokens", COUNT)
    assert said[1] == row["text"] + "\n"


@pytest.mark.parametrize(
    ("content", "options", "part"),
    [
        ('{"prompt": "' + "a" * 600 + '"}', [], ":1: the prompt has 619 tokens"),
        ('{"prompt": "a", "max_new_tokens": 0}', [], ":1: sampling: max_new_tokens: 0 is out of range"),
        ('{"prompt": "a"}', ["-n", "2"], ":1: n 2: answers of the likeliest tokens are all the same"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["--raw"], ":1: messages need a chat template"),
        ('{"messages": [{"role": "bard", "content": "a"}]}', [], ":1: messages"),
        ('{"prompt": "a", "stop": "b"}', ["--num-beams", "2"], ":1: stop with num_beams"),
        ('{"prompt": "a"}', ["--num-beams", "2", "-n", "3"], ":1: n 3 is more than num_beams 2"),
    ],
)
def test_nothing_is_written_when_a_row_cannot_be_answered(ranks, model, tmp_path, content, options, part):
    file, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    file.write_text(f"{content}\n", encoding="utf-8")
    code, out, _ = run(ranks, "--model", model, "--prompt-file", file, "--output", output, *options)
    assert isinstance(code, str) and part in code and code.startswith(str(file))
    assert out == "" and [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize("beams", [[], ["--num-beams", 2]], ids=["engine", "beams"])
def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_named(ranks, model, tmp_path, beams):
    from support.tokenizers import CHATML, byte_tokenizer

    tokenizer = byte_tokenizer(CHATML)
    vocabulary = len(tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "t")
    prompts = ["--prompt", "a", "--prompt", "a<more>"]
    code, out, _ = run(ranks, "--model", model, "--tokenizer", tmp_path / "t", "--raw", *prompts, *beams)
    assert code == (
        f"--prompt 2: the tokenizer makes token {vocabulary} of it, and the model's vocabulary has "
        f"{vocabulary} tokens; name the model's own tokenizer in --tokenizer"
    )
    assert out == ""


def test_an_attention_whose_package_is_missing_is_one_message(ranks, model):
    words = ["--model", model, "--prompt", "a", "--attn-implementation", "flash_attention_2"]
    code, out, _ = run(ranks, *words)
    assert isinstance(code, str) and code.startswith("--attn-implementation flash_attention_2: ")
    assert (out, "\n" in code) == ("", False)
