"""lm-eval's own Hugging Face backend is the judge: the same scores, sample by sample, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import ours, theirs, write_chat_model, write_gsm8k, write_mmlu, write_task_folder
from support.ranks import RankPool

NAMES = ["tiny_choices", "tiny_texts", "tiny_asked"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_folder(tmp_path_factory.mktemp("bench") / "tasks")


def _asked(tasks: Path, **more: Any) -> dict[str, Any]:
    return {"tasks": tuple(NAMES), "task_path": tasks, "chat": False, **more}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, model: Path, tasks: Path) -> dict[str, Any]:
    return ranks.run(1, ours, model, _asked(tasks), init_process_group=False)[0]


def _same_as_theirs(own: dict[str, Any], judge: dict[str, Any]) -> None:
    for name, samples in judge["samples"].items():
        samples = sorted(samples, key=lambda sample: sample["doc_id"])
        assert [one["doc_hash"] for one in own["samples"][name]] == [one["doc_hash"] for one in samples]
        for mine, sample in zip(own["samples"][name], samples, strict=True):
            assert mine["prompt"] == sample["arguments"][0][0]
            for metric in sample["metrics"]:
                assert mine["metrics"][metric] == pytest.approx(sample[metric], rel=1e-5, abs=1e-5)
            if name == "tiny_asked":
                assert mine["answers"] == sample["resps"]
        scores = own["tasks"][name]["scores"]
        for metric, score in scores.items():
            assert score["value"] == pytest.approx(judge["results"][name][f"{metric},none"], rel=1e-5)
            assert score["samples"] == len(samples)


def test_scores_are_those_of_lm_evals_own_backend(
    ranks: RankPool, model: Path, tasks: Path, alone: dict[str, Any]
) -> None:
    judge = ranks.run(1, theirs, model, tasks, NAMES, init_process_group=False)[0]
    _same_as_theirs(alone, judge)
    assert any(sample["answers"][0][0] for sample in alone["samples"]["tiny_asked"])


def test_also_as_chats_with_a_limit(ranks: RankPool, model: Path, tasks: Path) -> None:
    options = {"limit": 4, "apply_chat_template": True, "fewshot_as_multiturn": True}
    judge = ranks.run(
        1, theirs, model, tasks, ["tiny_choices", "tiny_asked"], init_process_group=False, **options
    )
    asked = {**_asked(tasks, limit=4), "chat": None, "tasks": ("tiny_choices", "tiny_asked")}
    own = ranks.run(1, ours, model, asked, init_process_group=False)[0]
    assert own["settings"]["chat_template"] is True
    _same_as_theirs(own, judge[0])


@pytest.mark.parametrize("parallel", ["none", "fsdp", "tp"])
def test_two_ranks_give_the_scores_of_one(
    ranks: RankPool, model: Path, tasks: Path, alone: dict[str, Any], parallel: str
) -> None:
    two, nothing = ranks.run(2, ours, model, _asked(tasks), parallel=parallel, init_process_group=False)
    assert nothing is None
    for name, samples in alone["samples"].items():
        for one, other in zip(samples, two["samples"][name], strict=True):
            assert one["doc_hash"] == other["doc_hash"]
            assert one["metrics"] == {
                metric: pytest.approx(value, rel=1e-5, abs=1e-5) for metric, value in other["metrics"].items()
            }
            if name == "tiny_asked":
                assert one["answers"] == other["answers"]


def test_our_tasks_run_with_fewer_rows_than_ranks(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    data = {"mmlu": write_mmlu(tmp_path / "mmlu"), "gsm8k": write_gsm8k(tmp_path / "gsm8k")}
    asked = {"tasks": ("mmlu", "gsm8k"), "data": data, "limit": 1, "num_fewshot": 1, "chat": True}
    asked["generation"] = {"max_gen_toks": 8}
    one = ranks.run(1, ours, model, asked, init_process_group=False)[0]
    three = ranks.run(3, ours, model, asked, init_process_group=False)[0]
    assert list(one["tasks"]) == ["mmlu", "mmlu_birds", "mmlu_stones", "gsm8k"]
    assert one["tasks"]["mmlu"]["scores"]["acc"]["samples"] == 2
    assert {name: task["scores"] for name, task in one["tasks"].items()} == {
        name: task["scores"] for name, task in three["tasks"].items()
    }
    prompt = one["samples"]["mmlu_birds"][0]["prompt"]
    assert prompt.startswith("<|im_start|>system\nThe following are multiple choice questions")
    assert prompt.count("<|im_start|>user") == 2 and prompt.endswith("<|im_start|>assistant\n")


def _refused(folder: Path) -> str:
    from support.benchmarks import add_lm_eval

    add_lm_eval()
    from shardyard.errors import UserError
    from shardyard.evaluate.tasks.foreign import load_foreign

    try:
        load_foreign(["mine"], folder, None)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tag", ["!function", "!%66unction", "!<!function>"])
def test_python_of_a_folder_is_refused_however_its_tag_is_written(
    ranks: RankPool, tmp_path: Path, tag: str
) -> None:
    folder, ran = tmp_path / "tasks", tmp_path / "ran"
    folder.mkdir()
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef f(row): return 'x'\n")
    (tmp_path / "beside.yml").write_text(f"doc_to_text: {tag} evil.f\n")
    (folder / "mine.yaml").write_text("task: mine\ninclude: ../beside.yml\ndataset_path: json\n")
    told = ranks.run(1, _refused, folder, init_process_group=False)[0]
    assert "names the Python evil.f (!function); allow that with --allow-code-execution" in told
    assert not ran.exists()
