"""The verb ``preprocess``: options, handlers, refusals, manifests, merge and inspect."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.tokenizers import CHATML, byte_tokenizer

from shardyard.cli import main
from shardyard.cli.preprocess_options import REFUSED
from shardyard.data.indexed import IndexedReader, IndexedWriter
from shardyard.data.preprocess import PackedSamples
from shardyard.data.preprocess.handlers import HANDLERS, find_handler
from shardyard.data.preprocess.manifest import key_of
from shardyard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(CHATML).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


TEXTS = ["first text", "the second", "a third one"]


def text_words(tmp_path, tokenizer_folder, *more, texts=TEXTS):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    words = ["--input", path, "--tokenizer-name-or-path", tokenizer_folder]
    return ["preprocess", *words, "--output-prefix", str(tmp_path / "out" / "data"), *more]


def fault(capsys, words):
    """The one line on stderr of a command that is refused."""
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    return printed.removeprefix("error: ").strip()


def documents(prefix):
    reader = IndexedReader(prefix)
    return [reader.document(number).tolist() for number in range(reader.num_documents)]


def test_text_with_its_manifest(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder, "--append-eod", "--workers", "2")
    assert main(words) == 0
    tokenizer = byte_tokenizer(CHATML)
    eos = tokenizer.eos_token_id
    prefix = tmp_path / "out" / "data_text_document"
    assert documents(prefix) == [[*tokenizer(text)["input_ids"], eos] for text in TEXTS]
    manifest = json.loads((tmp_path / "out" / "data_manifest.json").read_text(encoding="utf-8"))
    content = (tmp_path / "rows.jsonl").read_bytes()
    assert manifest["key"]["input 1: contents"] == [
        {"file": "rows.jsonl", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert manifest["key"]["--append-eod"] is True and len(manifest["key"]["tokenizer"]) == 32
    counts = manifest["counts"]["text"]
    assert counts["documents"] == counts["rows read"] == 3
    assert counts["tokens"] == sum(map(len, documents(prefix)))
    assert manifest["outputs"]["data_text_document.bin"] == 2 * counts["tokens"]
    assert {"shardyard", "python", "tokenizers"} <= set(manifest["versions"])
    printed = capsys.readouterr().out
    assert f"{prefix}.bin, .idx" in printed and "documents" in printed
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "data_manifest.json", "data_text_document.bin", "data_text_document.idx",
    ]  # fmt: skip


def test_the_same_again_does_nothing_and_says_so(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder)
    assert main(words) == 0
    file = tmp_path / "out" / "data_text_document.bin"
    before = file.stat().st_mtime_ns
    assert main([*words, "--workers", "2"]) == 0
    assert "already there" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == before
    assert main([*words, "--overwrite-cache"]) == 0
    assert file.stat().st_mtime_ns != before


def test_other_options_or_another_input_do_not_overwrite(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder)
    assert main(words) == 0
    content = (tmp_path / "out" / "data_text_document.bin").read_bytes()
    told = fault(capsys, [*words, "--append-eod"])
    assert "was made otherwise: --append-eod was False, is True" in told and "--overwrite-cache" in told
    write_rows(tmp_path / "rows.jsonl", [{"text": "first texT"}])
    assert "input 1: contents changed" in fault(capsys, words)
    assert (tmp_path / "out" / "data_text_document.bin").read_bytes() == content
    assert main([*words, "--append-eod", "--overwrite-cache"]) == 0
    assert len(documents(tmp_path / "out" / "data_text_document")) == 1


def test_foreign_files_are_not_overwritten(tmp_path, tokenizer_folder, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data_text_document.bin").write_bytes(b"precious")
    assert "no manifest" in fault(capsys, text_words(tmp_path, tokenizer_folder))
    assert (tmp_path / "out" / "data_text_document.bin").read_bytes() == b"precious"


def test_a_damaged_output_is_made_again(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder)
    assert main(words) == 0
    file = tmp_path / "out" / "data_text_document.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    capsys.readouterr()
    assert main(words) == 0
    assert "already there" not in capsys.readouterr().out
    assert file.read_bytes() == content


def test_several_keys_make_an_output_each(tmp_path, tokenizer_folder):
    rows = [{"title": "one", "body": "1"}, {"title": "two", "body": "22"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    words = ["--input", path, "--tokenizer-name-or-path", tokenizer_folder, "--json-keys", "title", "body"]
    assert main(["preprocess", *words, "--output-prefix", str(tmp_path / "o")]) == 0
    tokenizer = byte_tokenizer()
    for key in ("title", "body"):
        expected = [tokenizer(row[key])["input_ids"] for row in rows]
        assert documents(tmp_path / f"o_{key}_document") == expected


def test_several_inputs_follow_one_another_also_with_commas(tmp_path, tokenizer_folder):
    first = write_rows(tmp_path / "b.jsonl", [{"text": "b"}])
    (tmp_path / "a.txt").write_text("a\n", encoding="utf-8")
    for number, given in enumerate(([first, str(tmp_path / "a.txt")], [f"{first},{tmp_path / 'a.txt'}"])):
        words = ["--input", *given, "--tokenizer-name-or-path", tokenizer_folder]
        assert main(["preprocess", *words, "--output-prefix", str(tmp_path / f"o{number}")]) == 0
        tokenizer = byte_tokenizer()
        expected = [tokenizer(text)["input_ids"] for text in "ba"]
        assert documents(tmp_path / f"o{number}_text_document") == expected


def test_map_keys_name_columns_and_tags(tmp_path, tokenizer_folder):
    words = ["--tokenizer-name-or-path", tokenizer_folder, "--seq-length", "200"]
    plain = write_rows(tmp_path / "plain.jsonl", [{"instruction": "Q", "input": "", "output": "A"}])
    named = write_rows(tmp_path / "named.jsonl", [{"question": "Q", "answer": "A", "input": "not this"}])
    chat = [{"role": "ask", "text": "Q"}, {"role": "say", "text": "A"}]
    turns = write_rows(tmp_path / "turns.jsonl", [{"chat": chat}])
    columns = json.dumps({"prompt": "question", "query": "", "response": "answer"})
    tags = {"role_tag": "role", "content_tag": "text", "user_tag": "ask", "assistant_tag": "say"}
    cases = {
        "plain": [plain, "--handler-name", "AlpacaStyleInstructionHandler"],
        "named": [named, "--handler-name", "alpaca", "--map-keys", columns],
        "turns": [turns, "--handler-name", "SharegptStyleInstructionHandler", "--map-keys",
                  json.dumps({"messages": "chat", "tags": tags})],
    }  # fmt: skip
    for name, given in cases.items():
        assert main(["preprocess", *words, "--output-prefix", str(tmp_path / name), "--input", *given]) == 0
    samples = [PackedSamples(tmp_path / name)[0] for name in cases]
    assert len({tuple(sample.input_ids.tolist()) for sample in samples}) == 1
    text = byte_tokenizer(CHATML).decode(samples[0].input_ids)
    assert text == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"


def test_entries_of_a_dataset_info(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "rows.jsonl", [{"q": "Q", "a": "A"}])
    entry = {"file_name": "rows.jsonl", "columns": {"prompt": "q", "query": None, "response": "a"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")
    words = ["--handler-name", "LlamaFactoryInstructionHandler", "--dataset-dir", str(tmp_path)]
    words += ["--datasets", "mine", "--tokenizer-name-or-path", tokenizer_folder]
    assert main(["preprocess", *words, "--output-prefix", str(tmp_path / "o")]) == 0
    assert len(PackedSamples(tmp_path / "o")) == 1


def test_pairs(tmp_path, tokenizer_folder):
    rows = [{"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"}]
    words = [
        "--input",
        write_rows(tmp_path / "rows.jsonl", rows),
        "--tokenizer-name-or-path",
        tokenizer_folder,
    ]
    words += ["--handler-name", "AlpacaStylePairwiseHandler"]
    assert main(["preprocess", *words, "--output-prefix", str(tmp_path / "o")]) == 0
    decode = byte_tokenizer(CHATML).decode
    for half, reply in (("chosen", "good"), ("rejected", "bad")):
        ids = documents(tmp_path / f"o_packed_{half}_input_ids_document")
        labels = documents(tmp_path / f"o_packed_{half}_labels_document")[0]
        assert f"assistant\n{reply}<|im_end|>" in decode(ids[0])
        assert decode([label for label in labels if label != -100]).startswith(f"{reply}<|im_end|>")


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_options_that_would_do_nothing_are_refused_by_name(capsys, option):
    assert fault(capsys, ["preprocess", option, "1"]) == f"{option}: {REFUSED[option]}"
    spelt = option.replace("-", "_").replace("__", "--", 1)
    assert fault(capsys, ["preprocess", f"{spelt}=1"]) == f"{option}: {REFUSED[option]}"


REFERENCE_OPTIONS = """
input handler-name streaming hf-datasets-params datasets json-keys split-sentences keep-newlines prompt-type
prompt-type-path dataset-additional-keys interleave-probs mix-strategy dataset-dir overwrite-cache max-samples
seed cache-dir map-keys pack neat-pack script-data-dir enable-thinking pad-to-multiple-of data-obfuscation
obf-seed-content reasoning-effort drop-thinking tokenizer-type tokenizer-not-use-fast tokenizer-name-or-path
tokenizer-model append-eod seq-length make-vocab-size-divisible-by pad-vocab-size-to reward-tokens
output-prefix workers n-subs log-interval merge-group-keys
"""


def test_every_option_of_the_reference_acts_or_is_refused(capsys):
    assert main(["preprocess", "--help"]) == 0
    told = capsys.readouterr().out
    for name in REFERENCE_OPTIONS.split():
        assert (f"--{name}" in REFUSED) != (f"--{name} " in told or f"--{name}\n" in told), name


REFERENCE_HANDLERS = """
GeneralPretrainHandler AlpacaPretrainHandler SharegptPretrainHandler AlpacaStyleInstructionHandler
SharegptStyleInstructionHandler OpenAIInstructionHandler AlpacaStylePairwiseHandler
SharegptStylePairwiseHandler R1AlpacaStyleInstructionHandler R1SharegptStyleInstructionHandler
LlamaFactoryInstructionHandler
"""


def test_the_references_handlers_are_known_and_others_get_a_suggestion():
    assert set(REFERENCE_HANDLERS.split()) <= set(HANDLERS)
    with pytest.raises(UserError, match="did you mean AlpacaStyleInstructionHandler"):
        find_handler("AlpacaStyleInstructHandler")
    with pytest.raises(UserError, match=r"PPOAlpacaStyleInstructionHandler is refused: .*PPO"):
        find_handler("PPOAlpacaStyleInstructionHandler")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--inptu", "x"], "preprocess has no option --inptu; did you mean --input?"),
        (["--workers", "0"], "--workers: '0' is not a whole number from 1 on"),
        (["--prompt-type", "qwen3"], "--prompt-type: plain text has no template"),
        (["--seq-length", "9"], "--seq-length: documents are neither cut nor dropped"),
        (["--mix-strategy", "interleave_under"], "--mix-strategy interleave_under: each data set is written"),
        (["--handler-name", "alpaca", "--append-eod"], "--append-eod: the template ends replies"),
        (["--handler-name", "alpaca", "--pack"], "--pack: fills sequences of --seq-length"),
        (["--handler-name", "alpaca", "--neat-pack"], "--neat-pack: needs --pack"),
        (["--handler-name", "alpaca", "--map-keys", "{"], "--map-keys: not valid JSON"),
        (["--handler-name", "alpaca", "--map-keys", '{"promt": "q"}'], "unknown key 'promt'"),
        (["--handler-name", "alpaca", "--prompt-type", "qwenn"], "--prompt-type: 'qwenn' is not a template"),
        (["--handler-name", "alpaca", "--prompt-type-path", "t.json"], "templates.json is not read"),
        (["--handler-name", "alpaca", "--seq-length", "9", "--pad-to-multiple-of", "8"], "a multiple of"),
        (["--datasets", "x"], "--datasets, --dataset-dir: go with"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(tmp_path, tokenizer_folder, capsys, words, told):
    assert told in fault(capsys, text_words(tmp_path, tokenizer_folder, *words))
    assert not (tmp_path / "out").exists()


def test_paths_that_are_wrong(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder)
    place = words.index("--output-prefix") + 1
    assert "--output-prefix: name" in fault(capsys, words[: place - 1])
    assert "is a folder; give the name" in fault(capsys, [*words[:place], str(tmp_path)])
    assert "is a folder; give the name" in fault(capsys, [*words[:place], f"{tmp_path}/new/"])
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "cannot write" in fault(capsys, [*words[:place], str(tmp_path / "file" / "data")])
    missing = [*words[:2], str(tmp_path / "no.jsonl"), *words[3:]]
    assert "--input: " in (told := fault(capsys, missing)) and "no.jsonl" in told
    wrong = [word if word != tokenizer_folder else str(tmp_path / "none") for word in words]
    assert "--tokenizer-name-or-path: no such folder" in fault(capsys, wrong)
    assert "--input: name the files" in fault(capsys, ["preprocess", "--output-prefix", "x"])
    assert not (tmp_path / "out").exists()


def test_a_bad_row_leaves_nothing_behind(tmp_path, tokenizer_folder, capsys):
    words = text_words(tmp_path, tokenizer_folder)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "cut off')
    assert "rows.jsonl:4: not valid JSON" in fault(capsys, words)
    assert not (tmp_path / "out").exists()
    assert main([*words, "--on-bad-row", "skip"]) == 0
    assert len(documents(tmp_path / "out" / "data_text_document")) == 3


def a_set(prefix, *given):
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in given:
            writer.add_document(np.array(document, np.uint16))
        writer.finish()
    return str(prefix)


def test_merge(tmp_path, capsys):
    first, second = a_set(tmp_path / "a", [1, 2], [3]), a_set(tmp_path / "b", [4, 5, 6])
    out = str(tmp_path / "out")
    assert main(["preprocess", "merge", "--input", first, second, "--output-prefix", out]) == 0
    assert documents(out) == [[1, 2], [3], [4, 5, 6]]
    assert "2 data sets" in capsys.readouterr().out
    again = ["preprocess", "merge", "--input", second, "--output-prefix", out]
    assert "is there already" in fault(capsys, again)
    assert documents(out) == [[1, 2], [3], [4, 5, 6]]
    assert main([*again, "--overwrite-cache"]) == 0 and documents(out) == [[4, 5, 6]]
    other = str(tmp_path / "other")
    assert "is missing" in fault(capsys, ["preprocess", "merge", "--input", "no", "--output-prefix", other])


def test_a_merge_keeps_the_tokenizer_and_refuses_two(tmp_path, tokenizer_folder, capsys):
    folders = [tokenizer_folder, str(tmp_path / "other")]
    byte_tokenizer(CHATML, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>")).save_pretrained(
        folders[1]
    )
    prefixes = []
    for name, folder in (("a", folders[0]), ("b", folders[0]), ("c", folders[1])):
        assert main([*text_words(tmp_path, folder), "--output-prefix", str(tmp_path / name)]) == 0
        prefixes.append(str(tmp_path / f"{name}_text_document"))
    out = str(tmp_path / "ab")
    assert main(["preprocess", "merge", "--input", *prefixes[:2], "--output-prefix", out]) == 0
    merged, of_a = key_of(Path(out)), key_of(Path(prefixes[0]))
    assert merged["tokenizer"] == of_a["tokenizer"] and merged["merged"] == [
        Path(p).name for p in prefixes[:2]
    ]
    words = ["preprocess", "merge", "--input", *prefixes[1:], "--output-prefix", str(tmp_path / "bc")]
    assert "another tokenizer" in fault(capsys, words)
    assert not list(tmp_path.glob("bc*"))


def test_merging_packed_samples_merges_their_parts(tmp_path):
    parts = ("input_ids", "attention_mask", "labels")
    for name, ids in (("a", [7, 8, 9]), ("b", [5, 6])):
        for part in parts:
            given = ids if part != "attention_mask" else [1] * len(ids)
            a_set(tmp_path / f"{name}_packed_{part}_document", given)
    words = [
        "--input",
        str(tmp_path / "a"),
        str(tmp_path / "b_packed"),
        "--output-prefix",
        str(tmp_path / "c"),
    ]
    assert main(["preprocess", "merge", *words]) == 0
    assert [sample.input_ids.tolist() for sample in PackedSamples(tmp_path / "c")] == [[7, 8, 9], [5, 6]]


def test_merge_group_keys_take_what_a_folder_holds(tmp_path, capsys):
    for name, ids in (("x_2_text", [2]), ("x_1_text", [1]), ("x_1_code", [3])):
        a_set(tmp_path / "in" / name, ids)
    words = ["preprocess", "--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "all")]
    assert main([*words, "--merge-group-keys", "text", "code"]) == 0
    assert documents(tmp_path / "all_text") == [[1], [2]]
    assert documents(tmp_path / "all_code") == [[3]]
    assert "no .idx whose name contains 'none'" in fault(capsys, [*words, "--merge-group-keys", "none"])


def test_inspect_decodes_and_counts(tmp_path, tokenizer_folder, capsys):
    ids = byte_tokenizer()("hello tea")["input_ids"]
    prefix = a_set(tmp_path / "a", ids, ids[:2])
    a_set(tmp_path / "b_text_document", [1], [2])
    assert main(["preprocess", "inspect", str(tmp_path / "b")]) == 0  # the output prefix of preprocessing
    assert "documents 2" in capsys.readouterr().out
    assert main(["preprocess", "inspect", prefix, "--tokenizer", tokenizer_folder]) == 0
    text = capsys.readouterr().out
    assert "hello tea" in text and "documents 2" in text
    assert main(["preprocess", "inspect", prefix, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["documents"], told["tokens"], told["longest"]) == (2, len(ids) + 2, len(ids))


def test_the_references_script_and_ctrl_c(tmp_path, tokenizer_folder):
    """In a process of its own: interrupted it says how to go on, without a traceback, and goes on."""
    texts = [f"document {number} " + "tea " * 50 for number in range(30_000)]
    words = text_words(tmp_path, tokenizer_folder, "--save-interval", "0", "--workers", "2", texts=texts)[1:]
    command = [sys.executable, str(ROOT / "preprocess_data.py"), *words]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup and & have it ignored
    )  # fmt: skip
    partial = tmp_path / "out" / "data.partial" / "text"
    deadline = time.monotonic() + 120
    while not list(partial.glob("000001.json")) and time.monotonic() < deadline:
        assert running.poll() is None, running.stderr.read() if running.stderr else ""
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err == "interrupted\n" and "the same command goes on from there" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.partial"]
    assert main(["preprocess", *words]) == 0
    assert IndexedReader(tmp_path / "out" / "data_text_document").num_documents == 30_000
    assert not partial.exists()
