"""What a window holds: every row, document and token of it, and nothing that another window holds."""

import json
import multiprocessing
from itertools import pairwise

import numpy as np
import pytest
from data_stream.streams import NumberEncoder, batches, make_config, open_numbers, write_rows

from shardyard.data.pretrain import DocumentTokenizer
from shardyard.data.report import Report
from shardyard.data.sources import resolve_datasets
from shardyard.data.stream.build import Seat, make_maker, open_stream
from shardyard.data.stream.reader import RowReader
from shardyard.data.stream.tokenise import TOO_SHORT, Conversations, TokenStream
from shardyard.data.stream.window import Window, write_window
from shardyard.data.types import IGNORE_INDEX
from shardyard.errors import UserError


class WordTokenizer:
    """Each word a number, which is its id."""

    eos_token_id = 0

    def __call__(self, texts, **options):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def open_texts(folder, texts, *, cutoff_len=4, reset=False, append_eod=True, rows=None, **data):
    lines = rows or [json.dumps({"text": text}) for text in texts]
    (folder / "texts.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    config = make_config(folder, ["texts.jsonl"], data_manager_type="mg", training={"stage": "pt"}, **data)
    tokenize = DocumentTokenizer(WordTokenizer(), append_eod=append_eod, split_special_tokens=False)
    method = TokenStream(tokenize, cutoff_len=cutoff_len, reset_attention_mask=reset)
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    seat = Seat(folder / "stream", "key", "run", True)
    return open_stream(config, entries, method, seat, global_batch=2, look_ahead=False)


def windows_of(stream, epoch=0):
    found = []
    while (window := stream.sampler._cache.get(epoch, len(found))) is not None:
        found.append(window)
    return found


def documents(count):
    """Document n has 1 + 3n % 11 words, all of them its own."""
    return [" ".join(str(100 * n + k) for k in range(1 + 3 * n % 11)) for n in range(1, 1 + count)]


@pytest.mark.parametrize("buffer_size", [1, 5, 100])
def test_a_token_stream_loses_no_token(tmp_path, buffer_size):
    texts = documents(23)
    stream = open_texts(tmp_path, texts, buffer_size=buffer_size)
    for epoch in (0, 1):
        for number, window in enumerate(windows_of(stream, epoch)):
            mine = texts[number * buffer_size : (number + 1) * buffer_size]
            expected = {tuple([*map(int, text.split()), 0]) for text in mine}
            samples = [window.sample(n) for n in range(window.num_samples)]
            # Samples end to end, and the target of the last token: all documents, each whole.
            tokens = [token for sample in samples for token in sample.input_ids.tolist()]
            tokens.append(int(samples[-1].labels[-1]))
            assert tokens[1:] == [label for sample in samples for label in sample.labels.tolist()]
            ends = [0, *(n + 1 for n, token in enumerate(tokens) if token == 0)]
            pieces = [tuple(tokens[begin:end]) for begin, end in pairwise(ends)]
            assert len(pieces) == len(mine) and set(pieces) == expected and ends[-1] == len(tokens)
            lengths = [len(sample.input_ids) for sample in samples]
            assert lengths[:-1] == [4] * (len(samples) - 1) and 1 <= lengths[-1] <= 4
    stream.close()


def test_a_long_documents_samples_are_spread_over_their_window(tmp_path):
    stream = open_texts(tmp_path, [" ".join(map(str, range(1, 202)))], buffer_size=3)
    found = [stream.store[index].input_ids[0] for batch, _ in _batches(stream) for index in batch.indices]
    assert sorted(found) == list(range(1, 202, 4)) and found != sorted(found)
    stream.close()


def _batches(stream):
    cursor = 0
    while (batch := stream.sampler.global_batch_at(cursor)).epoch == 0:
        cursor = batch.end
        yield batch, None


def test_documents_of_a_window_are_segments_with_reset_attention_mask(tmp_path):
    stream = open_texts(tmp_path, ["1 2", "3 4 5", "6"], reset=True, buffer_size=3, cutoff_len=100)
    (window,) = windows_of(stream)
    sample = window.sample(0)
    assert sorted(sample.doc_lens) in ([2, 3, 3], [1, 3, 4], [2, 2, 4])
    ends = np.cumsum(sample.doc_lens)
    # A document's end has no target in the next one; the last document's end is only a target.
    assert (sample.labels[ends[:-1] - 1] == IGNORE_INDEX).all()
    assert (sample.input_ids[ends[:-1] - 1] == 0).all()
    stream.close()


def test_what_cannot_be_a_target_is_counted(tmp_path):
    texts = ["", "5", "7", "8 9", " "]
    stream = open_texts(tmp_path, texts, append_eod=False, buffer_size=1)
    windows = windows_of(stream)
    assert [window.num_samples for window in windows] == [0, 0, 0, 1, 0]
    total = Report.total([window.report for window in windows])
    assert total.rows == 5 and total.samples == 1
    told = {reason: (drop.count, drop.first[-2:]) for reason, drop in total.dropped.items()}
    assert told == {"empty document": (2, ":1"), TOO_SHORT: (2, ":2")}
    stream.close()


def test_bad_rows_stop_the_run_or_are_counted_with_their_place(tmp_path):
    rows = ['{"text": "1 2"}', '{"text": 3}', '{"text": "4 5"}', "{", '{"text": "6 7"}', '{"other": 1}']
    with pytest.raises(UserError, match=r"texts\.jsonl:2: .*must hold text"):
        open_texts(tmp_path, [], rows=rows, buffer_size=10)
    stream = open_texts(tmp_path, [], rows=rows, buffer_size=10, on_bad_row="skip")
    report = stream.first_report
    assert report.rows == 6 and sum(drop.count for drop in report.dropped.values()) == 3
    assert sorted(drop.first.rpartition(":")[2] for drop in report.dropped.values()) == ["2", "4", "6"]
    assert report.tokens == 9 - 1
    stream.close()


def test_a_bad_row_of_a_later_window_stops_every_rank_when_it_comes(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 121))
    (tmp_path / name).write_text((tmp_path / name).read_text() + "{\n", encoding="utf-8")
    options = {"buffer_size": 40, "global_batch": 79}
    leader = open_numbers(tmp_path, [name], **options)
    other = open_numbers(tmp_path, [name], leads=False, **options)
    for stream in (leader, other):
        cursor = stream.sampler.global_batch_at(0).end
        for _ in range(2):  # a fault stays one, and is never taken for the end of the data
            with pytest.raises(UserError, match=r"a\.jsonl:121: not valid JSON"):
                stream.sampler.global_batch_at(cursor)
    leader.close()
    other.close()


def test_conversation_rows_that_cannot_be_read_are_counted(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 9))
    lines = (tmp_path / name).read_text().splitlines()
    lines[2:2] = ["[1]", "{"]
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    stream = open_numbers(tmp_path, [name], buffer_size=6, on_bad_row="skip")
    assert sorted(n for _, numbers in batches(stream, 1) for n in numbers) == list(range(1, 9))
    report = windows_of(stream)[0].report
    assert (report.rows, report.samples) == (6, 4)
    assert sorted(drop.first.rpartition(":")[2] for drop in report.dropped.values()) == ["3", "4"]
    stream.close()


def test_tokenising_in_processes_changes_nothing(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 30), lambda n: "twice" if n % 5 == 0 else "r")
    config = make_config(tmp_path, [name], buffer_size=20, preprocessing_batch_size=3)
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    method = Conversations(entries, NumberEncoder(), capacity=8)
    one, many = (make_maker(config, entries, method).make(3, 1, count) for count in (1, 2))
    assert one is not None and many is not None
    for name in ("input_ids", "labels", "lengths", "doc_lens"):
        left, right = ([getattr(block, name) for block in made.blocks] for made in (one, many))
        assert np.array_equal(np.concatenate(left), np.concatenate(right))
    assert np.array_equal(one.units.indices, many.units.indices)
    assert one.report == many.report and one.is_last


def test_ids_beyond_the_vocabulary_are_found_in_any_window(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 9))
    config = make_config(tmp_path, [name], buffer_size=4)
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    maker = make_maker(config, entries, Conversations(entries, NumberEncoder(), capacity=None), vocab_size=8)
    assert maker.make(0, 0) is not None
    with pytest.raises(UserError, match="token id 8, but the model's vocabulary has 8"):
        maker.make(0, 1)


class CountingMixture:
    """Rows 0 to 99; remembers from where it was opened."""

    def __init__(self):
        self.opened = []

    def rows(self, start):
        self.opened.append(start)
        return iter([(0, number) for number in range(start, 100)])


def test_windows_in_order_read_files_once_and_jumps_skip():
    mixture = CountingMixture()
    reader = RowReader(mixture, 5)
    for window in (0, 1, 2, 17, 18, 19, 20, 0, 1, 1):
        expected = list(range(5 * window, min(5 * window + 5, 100)))
        assert [number for _, number in reader.rows(window)] == expected
    assert mixture.opened == [0, 85, 0, 5]
    reader.rows(16)
    reader.rows(18)  # one window between them: read over rather than opened anew
    assert mixture.opened == [0, 85, 0, 5, 80]


def test_a_forked_process_opens_files_of_its_own():
    """Two processes that read one open file would each miss what the other has read."""
    mixture = CountingMixture()
    reader = RowReader(mixture, 5)
    reader.rows(0)
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def read():
        answers.put(([number for _, number in reader.rows(1)], mixture.opened))

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    assert answers.get() == ([5, 6, 7, 8, 9], [0, 5])
    process.join()
    reader.rows(1)
    assert mixture.opened == [0]


def test_a_window_file_is_whole_or_refused(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 9))
    config = make_config(tmp_path, [name])
    entries = resolve_datasets(config.data.dataset, config.data.dataset_dir)
    made = make_maker(config, entries, Conversations(entries, NumberEncoder(), capacity=8)).make(0, 0)
    assert made is not None
    path = tmp_path / "w.window"
    write_window(path, made)
    assert [file.name for file in tmp_path.glob("w.*")] == ["w.window"]
    whole = path.read_bytes()
    window = Window(path)
    numbers = sorted(int(window.sample(n).input_ids[0]) for n in range(window.num_samples))
    assert numbers == list(range(1, 9)) and window.report == made.report
    assert sorted(window.units.indices.tolist()) == list(range(8))
    with pytest.raises(IndexError):
        window.sample(8)
    for size in (0, 7, 20, 300, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError):
            Window(path)
    path.write_bytes(b"otherwise" + whole[9:])
    with pytest.raises(ValueError, match="no window"):
        Window(path)
