"""The reward stage on tiny data: an ensemble is trained, saved and loaded, and scores as one."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from stages.lib.core.files import read_jsonl
from stages.lib.core.params.shared import Reduce
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.loading import load_reward_model, load_sequence_classifier, load_tokenizer
from stages.lib.lm.reward_ensemble import attach_ensemble, ensemble_members
from stages.lib.lm.scoring import RewardScorer, reward_scores, score_responses
from stages.reward.__main__ import main
from stages.reward.saving import save_ensemble
from tests.paths import ROOT

MODEL = Path("rounds/r0/reward/model")
SECOND = MODEL / "members/1"
PROMPTS, RESPONSES = [[5, 6], [7], [8, 9, 10]], [[11, 2], [12, 13, 14, 2], [2]]
WHOLE = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.fixture
def trio(tiny_reward_model):
    """Three members with their own calibrations, and, by hand, the minimum and the mean of their
    calibrated scores of WHOLE.
    """
    models = [tiny_reward_model(seed) for seed in (1, 2, 3)]
    for model, mean, std in zip(models, (0.5, -1.0, 0.0), (2.0, 0.5, 1.0), strict=True):
        model.config.mean, model.config.std = mean, std
    raw = [[model(torch.tensor([ids])).logits.item() for ids in WHOLE] for model in models]
    calibrated = list(
        zip(
            *(
                [(x - m.config.mean) / m.config.std for x in row]
                for m, row in zip(models, raw, strict=True)
            ),
            strict=True,
        )
    )
    return models, {
        "mean": [sum(scores) / 3 for scores in calibrated],
        "min": [min(scores) for scores in calibrated],
    }


@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_an_ensemble_scores_in_its_first_members_units(trio, tiny_lm, reduce):
    (first, *others), expected = trio
    first.config.ensemble_reduce = reduce
    model, wanted = (
        attach_ensemble(first, others),
        pytest.approx([0.5 + 2.0 * x for x in expected[reduce]], abs=1e-5),
    )
    assert reward_scores(model, WHOLE).tolist() == wanted
    # evaluation and PPO get the same scores
    lm = tiny_lm()
    results = score_responses(
        None,
        lambda: nullcontext(lm),
        PROMPTS,
        RESPONSES,
        reward_model=model,
        ends=EndTokens(2),
        temperature=1.0,
    )
    assert results.scores.tolist() == wanted


def test_the_stage_trains_saves_and_loads_an_ensemble(make_round, monkeypatch):
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    params.reward.ensemble, params.reward.max_steps = 2, 3
    params.reward.per_device_train_batch_size = 8
    main(params, "r0")
    metrics = read_jsonl(Path("rounds/r0/reward/metrics.jsonl"), "")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    tokenizer = load_tokenizer(MODEL)
    one, two = (
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        for path in (MODEL, SECOND)
    )
    assert len(ensemble_members(load_reward_model(MODEL, params.model))) == 2
    row = read_jsonl(Path("rounds/r0/prepare/data/pairs_eval.jsonl"), "")[0]
    ids = torch.tensor(
        [[*tokenizer(row["prompt"] + row["chosen"]).input_ids, tokenizer.eos_token_id]]
    )
    with torch.no_grad():
        a, b = (
            (model(ids).logits.item() - model.config.mean) / model.config.std
            for model in (one, two)
        )
    assert a != pytest.approx(b, abs=1e-3)  # trained with different seeds
    [scores] = [
        scores
        for scores in read_jsonl(Path("rounds/r0/reward/scores.jsonl"), "")
        if scores["id"] == row["id"]
    ]
    assert scores["chosen"] == pytest.approx((a + b) / 2, abs=1e-3)
    scorer = RewardScorer(MODEL, tokenizer, params)
    assert scorer.scores_per_member([ids[0].tolist()]).squeeze(1).tolist() == pytest.approx(
        [a, b], abs=1e-4
    )
    # saving fewer members removes the others
    save_ensemble([load_sequence_classifier(SECOND, params.model)], tokenizer, Reduce.mean, MODEL)
    assert (
        not (MODEL / "members").exists()
        and len(ensemble_members(load_reward_model(MODEL, params.model))) == 1
    )
