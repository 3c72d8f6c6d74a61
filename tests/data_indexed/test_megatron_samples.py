"""``MegatronSamples`` gives what megatron-core's GPTDataset and BlendedDataset give, blends and all."""

import pickle

import numpy as np
import pytest
from data_indexed.megatron_peer import EOD, VOCABULARY, run_megatron

from shardyard.data.batches import restarting_positions
from shardyard.data.indexed import IndexedReader, IndexedWriter, MegatronSamples
from shardyard.data.indexed.blending import blend_by_weight, blend_exhaustively
from shardyard.data.types import IGNORE_INDEX
from shardyard.errors import UserError

PARTS = ("train", "valid", "test")


def write(prefix, generator, *, documents, longest, sentences=False, empty=False):
    """Random documents that end with EOD and hold another one here and there."""
    with IndexedWriter(prefix, "uint16") as writer:
        for number in range(documents):
            body = generator.integers(EOD, VOCABULARY, generator.integers(0, longest)).tolist()
            tokens = [] if empty and number % 7 == 3 else [*body, EOD]
            parts = [tokens[:2], tokens[2:]] if sentences and len(tokens) > 3 else [tokens]
            writer.add_document(parts)
        writer.finish()
    return str(prefix)


def job(
    prefixes, weights=None, *, size, cutoff_len, seed=1234, split="100,0,0", part=0, take=1000, **options
):
    return {
        "do": "samples",
        "prefixes": prefixes,
        "weights": weights,
        "split": split,
        "sizes": [size] * 3,
        "part": part,
        "cutoff_len": cutoff_len,
        "seed": seed,
        "take": take,
        **options,
    }


def ours(job, **changes):
    arguments = {
        "split": job["split"],
        "which": PARTS[job["part"]],
        "num_samples": job["sizes"][0],
        "cutoff_len": job["cutoff_len"],
        "seed": job["seed"],
        "reset_attention_mask": job.get("reset", False),
        "eod_mask_loss": job.get("eod_mask_loss", False),
        "eod_id": EOD,
    }
    return MegatronSamples(job["prefixes"], job["weights"], **{**arguments, **changes})


def assert_same_samples(samples, job, theirs):
    wanted = job["sizes"][0]
    assert len(samples) == (theirs["length"] if wanted is None else wanted)
    count = min(len(samples), len(theirs["tokens"]))
    assert count == min(len(samples), job["take"])
    for index in range(count):
        sample = samples[index]
        assert sample.input_ids.dtype == sample.labels.dtype == np.int32
        assert np.array_equal(sample.input_ids, theirs["tokens"][index])
        trained = theirs["loss_mask"][index] == 1
        assert np.array_equal(sample.labels[trained], theirs["labels"][index][trained])
        assert (sample.labels[~trained] == IGNORE_INDEX).all()
        assert np.array_equal(restarting_positions(sample.doc_lens), theirs["position_ids"][index])


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Small cases of every branch of the index, and what megatron-core makes of them."""
    folder = tmp_path_factory.mktemp("samples")
    generator = np.random.default_rng(7)
    a, b = (write(folder / name, generator, documents=120, longest=80) for name in ("a.1", "b"))
    sentences = write(folder / "sentences", generator, documents=60, longest=30, sentences=True)
    short = write(folder / "short", generator, documents=20, longest=12)
    in_an_epoch = (IndexedReader(short).num_tokens - 1) // 7
    threshold = in_an_epoch + int(0.8 * in_an_epoch)  # from here on the second epoch is shuffled in
    jobs = {
        "one set, two epochs": job([a], size=1000, cutoff_len=8),
        "last epoch just shuffled in": job([short], size=threshold, cutoff_len=7, seed=0),
        "last epoch just apart": job([short], size=threshold - 1, cutoff_len=7, seed=0),
        "a weight's surplus needs another epoch": job([short], [1.0], size=in_an_epoch, cutoff_len=7, seed=2),
        "one set, many epochs": job([short], size=400, cutoff_len=5, seed=3),
        "one set, one epoch": job([b], size=None, cutoff_len=16),
        "one set with a weight": job([short], [2.0], size=200, cutoff_len=8),
        "blend by weight, two epochs": job(
            [a, b, sentences], [0.5, 0.4, 0.1], size=1000, cutoff_len=16, seed=42
        ),
        "blend by size": job([a, short, sentences], size=300, cutoff_len=16),
        "blend of all": job([a, short, sentences], size=None, cutoff_len=16),
        "documents longer than a sample": job([b], size=1500, cutoff_len=3, seed=9),
        "sequences split like documents": job([sentences], size=300, cutoff_len=4, split="7,2,1", part=1),
        "validation part": job([a], size=90, cutoff_len=16, split="90,8,2", part=1, reset=True),
        "test part of a blend": job([a, b], [1.0, 3.0], size=50, cutoff_len=16, split="900,50,50", part=2),
        "documents apart": job([a], size=300, cutoff_len=16, reset=True),
        "documents apart, their ends not trained": job(
            [a], size=300, cutoff_len=16, reset=True, eod_mask_loss=True
        ),
        "only their ends not trained": job([a], size=300, cutoff_len=16, eod_mask_loss=True),
    }
    weights = [0.1, 0.2, 0.3, 0.4]
    blends = [
        {"do": "blend", "weights": weights, "size": 3000},
        {"do": "blend", "weights": [5, 700, 1, 33, 33]},
    ]
    results = run_megatron([*jobs.values(), *blends], folder)
    return jobs, dict(zip(jobs, results, strict=False)), results[-2:]


def test_samples_are_megatrons(peer):
    jobs, theirs, _ = peer
    for name, wanted in jobs.items():
        try:
            assert_same_samples(ours(wanted), wanted, theirs[name])
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("name", ["one set, two epochs", "blend by weight, two epochs"])
def test_a_thousand_samples_take_two_epochs_of_each_set(peer, name):
    wanted = peer[0][name]
    assert wanted["sizes"][0] == wanted["take"] == 1000
    for prefix, share in zip(wanted["prefixes"], wanted["weights"] or [1.0], strict=True):
        assert 1 < 1000 * share * wanted["cutoff_len"] / IndexedReader(prefix).num_tokens < 2


def test_ends_of_sequences_stand_in_for_the_token_where_no_text_holds_it(tmp_path):
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        for length in (3, 1, 5, 8, 2):
            writer.add_document([*range(1, length + 1), EOD])
        writer.finish()
    options = {"split": "1", "num_samples": 9, "cutoff_len": 4, "seed": 5, "reset_attention_mask": True}
    by_token = MegatronSamples([tmp_path / "set"], **options, eod_id=EOD)
    by_length = MegatronSamples([tmp_path / "set"], **options)
    assert [s.doc_lens for s in by_token] == [s.doc_lens for s in by_length]
    assert any(len(s.doc_lens) > 1 for s in by_token)


def test_blends_are_the_compiled_helpers(peer):
    by_weight, exhaustive = peer[2]
    of_set, in_set = blend_by_weight([0.1, 0.2, 0.3, 0.4], 3000)
    assert np.array_equal(of_set, by_weight["of_set"])
    assert np.array_equal(in_set, by_weight["in_set"])
    of_set, in_set = blend_exhaustively([5, 700, 1, 33, 33])
    assert np.array_equal(of_set, exhaustive["of_set"])
    assert np.array_equal(in_set, exhaustive["in_set"])


def test_another_process_rebuilds_the_same_samples(peer):
    wanted = peer[0]["blend by weight, two epochs"]
    samples = ours(wanted)
    sent = pickle.dumps(samples)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert len(copy) == len(samples)
    assert all(np.array_equal(copy[i].input_ids, samples[i].input_ids) for i in range(0, 1000, 97))
    with pytest.raises(IndexError):
        samples[1000]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [1.0]}, "2 sets have 1 weights"),
        ({"weights": [1.0, 0.0]}, "weights must be above 0"),
        ({"weights": [1.0, 1.0], "num_samples": None}, "weights need a number of samples"),
        ({"num_samples": 10**6}, "one epoch of all sets has .* samples, fewer than the 1000000 of this run"),
        ({"split": "1,0,0", "which": "valid"}, "the valid part of its 20 documents .* has no token"),
        ({"split": "abc"}, "data.split"),
        ({"cutoff_len": 5000}, "shorter than one sample"),
        ({"seed": -1}, "training.seed: -1 does not fit"),
        ({"prefixes": []}, "no data set is named"),
    ],
)
def test_what_megatron_could_not_build_is_refused_with_the_reason(tmp_path, changes, message):
    generator = np.random.default_rng(0)
    prefixes = [write(tmp_path / name, generator, documents=20, longest=20) for name in ("a", "b")]
    options = {
        "prefixes": prefixes,
        "weights": None,
        "split": "1",
        "num_samples": 10,
        "cutoff_len": 8,
        "seed": 1,
    }
    assert len(MegatronSamples(**options)) == 10
    with pytest.raises(UserError, match=message):
        MegatronSamples(**{**options, **changes})


def random_jobs(folder, count):
    generator = np.random.default_rng(2024)
    jobs = []
    for number in range(count):
        split = str(generator.choice(["100,0,0", "80,15,5", "1/1/1"])).replace("/", ",")
        few = split == "100,0,0"
        weighted = bool(generator.integers(2))
        # Without weights megatron-core fails where any part of a set has no sample.
        fewest = (3 if weighted else 40) if few else 100
        prefixes = [
            write(
                folder / f"{number}-{part}",
                generator,
                documents=int(generator.integers(fewest, 200)),
                longest=int(generator.integers(2 if few else 20, 60)),
                sentences=bool(generator.integers(2)),
                empty=bool(generator.integers(2)),
            )
            for part in range(generator.integers(1, 5))
        ]
        jobs.append(
            job(
                prefixes,
                generator.uniform(0.05, 1, len(prefixes)).tolist() if weighted else None,
                size=int(generator.integers(1, 1200)) if weighted or len(prefixes) == 1 else None,
                cutoff_len=int(generator.integers(1, 24)),
                seed=int(generator.integers(2**32)),
                split=split,
                part=0 if few else int(generator.integers(3)),
                reset=bool(generator.integers(2)),
                eod_mask_loss=bool(generator.integers(2)),
            )
        )
    return jobs


@pytest.mark.soak
def test_random_shapes_seeds_and_blends_are_megatrons(tmp_path):
    jobs = random_jobs(tmp_path, 150)
    for number, (wanted, theirs) in enumerate(zip(jobs, run_megatron(jobs, tmp_path), strict=True)):
        try:
            assert_same_samples(ours(wanted), wanted, theirs)
        except AssertionError as error:
            raise AssertionError(f"case {number}: {wanted}") from error


@pytest.mark.soak
def test_random_blends_are_the_compiled_helpers(tmp_path):
    generator = np.random.default_rng(11)
    weights = [(lambda w: (w / w.sum()).tolist())(generator.uniform(0.001, 1, k)) for k in (2, 3, 4, 9, 60)]
    sizes = [generator.integers(1, 3000, k).tolist() for k in (2, 3, 4, 9, 60)]
    equal = [[0.25] * 4, [0.5, 0.5], [1 / 3] * 3, [0.1] * 10]  # ties at every round
    jobs = [{"do": "blend", "weights": w, "size": 20_000} for w in (*weights, *equal)]
    jobs += [{"do": "blend", "weights": s} for s in (*sizes, [50] * 4)]
    for wanted, theirs in zip(jobs, run_megatron(jobs, tmp_path), strict=True):
        by_weight = "size" in wanted
        of_set, in_set = (
            blend_by_weight(wanted["weights"], wanted["size"])
            if by_weight
            else blend_exhaustively(wanted["weights"])
        )
        assert np.array_equal(of_set, theirs["of_set"])
        assert np.array_equal(in_set, theirs["in_set"])
