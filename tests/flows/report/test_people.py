"""What people judged: statistics worked out by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.report import people, summary
from flows.report.people import Comparison, Label, Of, Verdict
from flows.report.round_files import label_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_jsonl, write_text
from stages.lib.metrics.stats import corrected_mean
from stages.replay.badcases import Badcase, ledger_path
from tests.flows.report.reading import all_ran

F, S, T, B, K = (Verdict(name) for name in ("first", "second", "tie", "both_bad", "skip"))


def comparison(number: int, **votes: float) -> Comparison:
    return Comparison(f"prompt {number}", ("ppo", "sft"), (f"a {number}", f"b {number}"), votes)


def label(of: Comparison, verdict: Verdict, by: str = "Ann", left: str = "ppo") -> Label:
    return Label(
        **{"id": of.id, "of": Of.evaluation, "by": by, "at": "2026-11-30T12:00:00Z"},
        **{"prompt": of.prompt, "names": of.names, "texts": of.texts},
        **{"left": left, "verdict": verdict},
    )


def test_the_win_rate_of_people_and_what_judges_are_worth() -> None:
    votes = (1.0, 1.0, 0.0, 0.5, 0.0, 1.0)
    compared = [comparison(i, together=vote) for i, vote in enumerate(votes)]
    verdicts = (F, F, F, S, T, K)
    labels = [label(one, verdict) for one, verdict in zip(compared, verdicts, strict=True)]
    result = people.results(compared, labels, Of.evaluation)
    assert result is not None
    assert result.judged == 5 and result.persons == 1  # the skipped one is no verdict
    assert result.win_rate[0] == pytest.approx((3 + 0 + 0.5) / 5)
    # both decide 0, 1 and 2; they agree in 0 and 1
    count, (rate, low, high) = result.judges["together"]
    assert (count, rate) == (3, pytest.approx(2 / 3)) and low < rate < high
    assert result.left == pytest.approx(3 / 4)  # the policy's, which was always on the left
    assert result.agreement == (0, None, None)
    assert result.corrected is None  # of fewer than 20 labels


def test_two_persons_agree_beyond_chance() -> None:
    compared = [comparison(i) for i in range(4)]
    ann, bo = (F, F, S, T), (F, S, S, B)
    labels = [
        label(one, verdict, by)
        for by, verdicts in (("Ann", ann), ("Bo", bo))
        for one, verdict in zip(compared, verdicts, strict=True)
    ]
    result = people.results(compared, labels, Of.evaluation)
    assert result is not None and result.persons == 2
    # by chance 2/4 * 1/4 + 1/4 * 2/4 + 1/4 * 1/4 = 5/16: (3/4 - 5/16) / (1 - 5/16)
    assert result.agreement == (4, 0.75, pytest.approx(7 / 11))
    assert result.win_rate[0] == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)


def test_a_label_of_texts_that_are_gone_does_not_count() -> None:
    assert people.results([comparison(1)], [label(comparison(2), F)], Of.evaluation) is None


def test_people_correct_a_jury_that_always_prefers_the_policy() -> None:
    """The jury's win rate is 1 everywhere; people prefer the policy in a quarter."""
    compared = [comparison(i, together=1.0) for i in range(100)]
    labels = [label(one, F if i % 4 == 0 else S) for i, one in enumerate(compared[:40])]
    result = people.results(compared, labels, Of.evaluation)
    assert result is not None and result.corrected is not None
    assert result.corrected[0] == pytest.approx(0.25)
    # the labelled comparisons are not counted among the others, on which the jury is alone
    votes = [*[1.0, 0.0] * 20, *[1.0] * 60]
    compared = [comparison(i, together=vote) for i, vote in enumerate(votes)]
    outcomes = [vote if i % 5 else 1 - vote for i, vote in enumerate(votes[:40])]
    labels = [
        label(one, F if outcome else S) for one, outcome in zip(compared, outcomes, strict=False)
    ]
    result = people.results(compared, labels, Of.champion)
    assert result is not None
    assert result.corrected == corrected_mean(outcomes, votes[:40], votes[40:])
    # of pairs and badcases, which are no random sample of prompts, there is none
    assert people.results(compared, labels, Of.badcases).corrected is None  # type: ignore[union-attr]


ROW: Mapping[str, Any] = {"sample": 0, "sft": "s", "ppo": "p", "champion": "c"}


@pytest.fixture
def rounds(project: Path) -> Path:
    rows = [
        {"id": "a", "prompt": "One", **ROW, "ppo_against_sft": 1.0, "ppo_against_champion": 0.0},
        {"id": "a", "prompt": "One", **ROW, "sample": 1},
        {"id": "b", "prompt": "Two", **ROW, "ppo_judge_score": 0.2, "sft_judge_score": 0.2},
    ]
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", rows)
    pairs = [
        {"id": name, "prompt": name, "chosen": f"{name} good", "rejected": f"{name} bad"}
        for name in ("far", "near", "reversed")
    ]
    write_jsonl(stage_dir("r0", "prepare") / "data/pairs_eval.jsonl", pairs)
    scores = [{"id": "far", "chosen": 3.0, "rejected": 1.0}]
    scores.append({"id": "reversed", "chosen": -1.0, "rejected": 2.0})
    scores.append({"id": "near", "chosen": 1.0, "rejected": 1.5})
    write_jsonl(stage_dir("r0", "reward") / "scores.jsonl", scores)
    case = Badcase(
        **{"id": "c", "round": "r0", "cause": "no_eos", "policy": "abc", "origin": "fresh"},
        **{"prompt_id": "q", "prompt": "Q", "response": "bad", "score": 1.0, "repetition": 0.0},
        **{"sft": "fine", "votes": {"together": 0.0}},
    )
    reported = case.model_copy(update={"id": "d", "policy": None, "response": "by a person"})
    empty = case.model_copy(update={"id": "e", "response": ""})
    cases = [one.model_dump(mode="json") for one in (case, reported, empty)]
    write_jsonl(ledger_path("r0"), cases)
    return project


@pytest.mark.usefixtures("rounds")
def test_what_there_is_to_compare() -> None:
    compared = {one.prompt: one for one in people.comparisons("r0", Of.evaluation)}
    assert {*compared} == {"One", "Two"}  # one sample per prompt
    assert compared["One"].texts == ("p", "s") and compared["One"].votes == {"together": 1.0}
    assert compared["Two"].votes == {"the primary judge": 0.5}
    [champion, _] = sorted(people.comparisons("r0", Of.champion), key=lambda one: str(one.prompt))
    assert champion.texts == ("p", "c") and champion.votes == {"together": 0.0}
    [case] = people.comparisons("r0", Of.badcases)
    assert case.texts == ("bad", "fine") and case.votes == {"together": 0.0}
    near, far, reversed_ = people.comparisons("r0", Of.pairs)
    assert near.texts == ("near good", "near bad") and near.votes == {"the reward model": 0.0}
    assert far.votes == {"the reward model": 1.0} != reversed_.votes


def test_a_round_without_texts_says_which_stage_makes_them(project: Path) -> None:
    with pytest.raises(BadInput, match="dvc repro evaluate@r0"):
        people.comparisons("r0", Of.evaluation)
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", [])
    with pytest.raises(BadInput, match="nothing to compare"):
        people.comparisons("r0", Of.evaluation)


def test_a_line_that_is_no_label_is_named(project: Path) -> None:
    write_text(label_path("r0"), '{"id": "x"}\n')
    with pytest.raises(BadInput, match=r"labels/r0\.jsonl:1"):
        people.read_labels("r0")


def test_the_report_has_what_people_judged_beside_the_judges(rounds: Path) -> None:
    one, two = people.comparisons("r0", Of.evaluation)
    people.write_labels("r0", [label(one, F), label(two, F)])
    [line] = summary.judge_lines(["r0"], all_ran("r0"))
    assert line.startswith("r0: judged by 1 person (evaluation): win rate of ppo against sft 1.000")
    (stage_dir("r0", "evaluate") / "samples.jsonl").unlink()  # e.g. in another clone
    assert summary.judge_lines(["r0"], all_ran("r0")) == []
