"""Which settings make two evaluations comparable."""

from pathlib import Path

import pytest

from stages.evaluate.comparability import (
    differences,
    evaluation_id,
    evaluation_settings,
)
from stages.lib.core.params import check_params


def settings(eval_hash: str = "f", **changes: dict[str, object]):
    return evaluation_settings(check_params(changes, "test"), eval_hash)


@pytest.mark.parametrize(
    "other",
    [
        settings("g"),
        settings(evaluate={"samples_per_prompt": 3}),
        settings(evaluate={"checkpoint_samples_per_prompt": 2}),
        settings(evaluate={"tie_margin": 0.1}),
        settings(evaluate={"judges": ["lexicon", "zero_shot"]}),
        settings(evaluate={"zero_shot": {"better": " good"}}),
        settings(ppo={"temperature": 0.7}),
        settings(ppo={"response_length": 16}),
        settings(prepare={"prompt_format": "chat"}),
        settings(seed=1),
    ],
)
def test_each_setting_makes_another_evaluation(other):
    assert evaluation_id(settings()) != evaluation_id(other)
    assert len(differences(settings(), other)) == 1


def test_settings_that_change_no_number_do_not():
    same = settings(evaluate={"bootstrap_resamples": 100}, ppo={"learning_rate": 1e-5})
    assert evaluation_id(settings()) == evaluation_id(same) and differences(settings(), same) == []
    lexicon = {"judges": ["lexicon"]}
    other_question = lexicon | {"zero_shot": {"better": " good"}}
    assert settings(evaluate=lexicon) == settings(evaluate=other_question)
    # the order of keys is of no effect
    assert evaluation_id(dict(reversed(same.items()))) == evaluation_id(same)


def test_an_edited_judge_of_the_same_name_is_another_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = {"judges": ["taste:score"]}
    made = []
    for value in (0.0, 1.0, 0.0):
        code = f"def score(prompts, responses):\n    return [{value}] * len(prompts)\n"
        Path("taste.py").write_text(code)
        made.append(settings(evaluate=mine))
    before, edited, restored = made
    assert differences(before, restored) == []
    [line] = differences(before, edited)
    assert line.startswith("files of evaluate.judges")


def test_a_language_model_that_judges_is_part_of_the_evaluation():
    def judged_by(
        model: str,
        rubric: str = "The kinder one.",
        judges: tuple[str, ...] = ("lexicon", "endpoint"),
    ):
        endpoint = {"base_url": "http://127.0.0.1:8000/v1", "model": model, "rubric": rubric}
        return settings(evaluate={"judges": list(judges)}, annotate={"endpoint": endpoint})

    assert differences(judged_by("large"), judged_by("large")) == []
    assert differences(judged_by("large"), judged_by("small")) == [
        "annotate.endpoint.model large and small"
    ]
    assert len(differences(judged_by("large"), judged_by("large", "The shorter one."))) == 1
    # a model that only labels, or is in params.yaml without being used, is not
    only_lexicon = [judged_by(model, judges=("lexicon",)) for model in ("large", "small")]
    assert differences(*only_lexicon) == []
