"""The evaluation section: what is refused, and that the names are those of the benchmarks."""

from __future__ import annotations

import pytest

from shardyard.config import load_config
from shardyard.config.evaluation_rules import BY_LIKELIHOOD
from shardyard.errors import UserError

WORDS = ("--model.model_name_or_path=m", "--training.output_dir=o", "--data.dataset=d.jsonl")
DATA = "--evaluation.task_data_path=t"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--evaluation.tasks", "gsm8k", DATA),
            "gsm8k is refused: its answers are generated",
        ),
        (("--evaluation.tasks", "helaswag", DATA), "helaswag is unknown; did you mean hellaswag?"),
        (("--evaluation.tasks", "boolq", "boolq", DATA), "one name stands there twice"),
        (("--evaluation.tasks", "boolq"), "needs evaluation.task_data_path"),
        (("--evaluation.tasks", "boolq", DATA, "--evaluation.at_end=false"), "no time is left"),
        (("--evaluation.tasks", "boolq", DATA, "--evaluation.every=0"), "evaluation.every"),
    ],
)
def test_what_cannot_work_is_refused(words, text):
    with pytest.raises(UserError) as caught:
        load_config([*WORDS, *words])
    assert text in str(caught.value)


def test_what_works_is_taken_and_what_has_no_effect_is_told():
    loaded = load_config([*WORDS, "--evaluation.tasks", "boolq", "mmlu", DATA, "--evaluation.every", "5"])
    assert loaded.config.evaluation.tasks == ("boolq", "mmlu") and loaded.config.evaluation.at_end
    told = load_config([*WORDS, "--evaluation.every", "5"]).warnings
    assert any("evaluation.every" in line and "no effect without evaluation.tasks" in line for line in told)


def test_the_names_are_benchmarks_that_choose_by_likelihood():
    from shardyard.evaluate.tasks import catalog

    for name in catalog.BENCHMARKS:
        spec = catalog.load(name)
        parts = [spec, *spec.get("kinds", {}).values()]
        kinds = {part.get("config", {}).get("output_type", "multiple_choice") for part in parts}
        assert (kinds == {"multiple_choice"}) == (name in BY_LIKELIHOOD), name
        assert name not in BY_LIKELIHOOD or "chat" not in spec, "nor in a chat"
