"""Two rounds in which each model has one answer: the policy of r0 writes " was sad.", its SFT model
" was great."; in r1 it is the other way round. So all that replay finds and retests is known by
hand.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge
from stages.replay.__main__ import main
from stages.replay.badcases import Badcase, Cause
from stages.replay.mining import BadcaseThresholds
from stages.replay.retest import resample_and_retest
from stages.replay.sampler import Sampler

GREAT, SAD = " was great.", " was sad."
TRIES = 3
Rows = list[dict]


@pytest.fixture
def two_rounds(
    make_round: Callable[[str, float], Params], always: Callable[[str, Path], None]
) -> tuple[dict, Rows, Rows]:
    """metrics.json of r1, and the badcases of r0 as both rounds have them."""
    for round_, policy, sft in (("r0", SAD, GREAT), ("r1", GREAT, SAD)):
        params = make_round(round_, 1.0)
        always(sft, Path("rounds") / round_ / "sft/model")
        always(policy, Path("rounds") / round_ / "ppo/policy")
        values = params.model_dump()
        values["evaluate"]["judges"] = ["lexicon"]
        values["replay"] |= {"max_badcases": 64, "tries": TRIES}
        values["ppo"]["temperature"] = 0.5
        main(check_params(values, "test"), round_)
    metrics = json.loads(Path("rounds/r1/replay/metrics.json").read_text())
    r0, r1 = (
        read_jsonl(Path("rounds") / round_ / "replay/data/badcases.jsonl", "")
        for round_ in ("r0", "r1")
    )
    return metrics, r0, [row for row in r1 if row["round"] == "r0"]


def calibrated_score(prompt: str, response: str) -> float:
    """Of r0's reward model by transformers; make_round calibrates it to mean 0.5 and std 2."""
    folder = "rounds/r0/reward/model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids + tokenizer(response + tokenizer.eos_token).input_ids
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits.item() - 0.5) / 2.0


def test_badcases_and_retests_by_hand(two_rounds: tuple[dict, Rows, Rows]) -> None:
    metrics, r0, r0_in_r1 = two_rounds
    lost = [row for row in r0 if row["cause"] == "judge_loses"]
    # one per prompt; the jury prefers SFT's response to each
    prompts = sorted(
        f"The {noun}" for noun in ("dinner", "match", "party", "movie", "walk", "trip")
    )
    assert sorted(row["prompt"] for row in lost) == prompts
    facts = {
        (row["response"], row["sft"], row["better"], row["votes"]["together"], row["origin"])
        for row in lost
    }
    assert facts == {(SAD, GREAT, GREAT, 0.0, "fresh")}
    for row in lost:
        assert row["score"] == pytest.approx(calibrated_score(row["prompt"], SAD), abs=1e-3)
        # two tokens differ from SFT's; their logits are 80, halved by the temperature
        assert row["kl"] == pytest.approx(2 * 80 / 0.5, rel=1e-3)

    # r0's policy always writes the same: it loses again each time, but never repeats the exploit
    # of a rollout that was overpaid. r1's policy ties with what SFT wrote.
    by_chance = repaired = 0
    for row in r0_in_r1:
        own, later = row["tries"]
        assert (own["round"], own["of"], later["round"], later["of"]) == ("r0", TRIES, "r1", TRIES)
        assert own["fired"] == (TRIES if row["cause"] == "judge_loses" else 0)
        assert later["fired"] == 0
        ranked = row["better"] is None or calibrated_score(
            row["prompt"], row["better"]
        ) > calibrated_score(row["prompt"], row["response"])
        assert own["ranked"] == later["ranked"] == ranked
        by_chance += ranked and not own["fired"]
        repaired += ranked
    assert {row["cause"] for row in r0_in_r1} >= {"judge_loses", "blind_spot"}
    assert metrics["retested"] == len(r0) and metrics["repaired"] == repaired
    assert metrics["repaired_by_chance"] == by_chance
    assert 0 < by_chance < repaired < len(r0)


def test_a_reward_model_that_finds_both_equal_puts_neither_first(
    make_round: Callable[[str, float], Params],
) -> None:
    params = make_round("r0", 1.0)
    case = Badcase(
        id="a1",
        round="r0",
        cause=Cause.human,
        origin="ada",
        prompt_id="p",
        prompt="The walk",
        response=" was wet.",
        better=" was wet.",
        score=0.0,
        repetition=0.0,
    )
    limits = BadcaseThresholds(params.replay, kl=1e9, lexicon=True)
    jury = Jury({"lexicon": LexiconJudge(0.05)})
    [retested] = resample_and_retest([case], Sampler(params, "r0"), jury, 0, limits, "r1")
    assert [retest.ranked for retest in retested.tries] == [False]
