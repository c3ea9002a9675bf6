"""The reward stage on tiny data: an ensemble is trained, saved and loaded, and scores as one."""

from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from stages.lib.core.files import read_jsonl
from stages.lib.core.params.shared import Reduce
from stages.lib.lm.loading import (
    attach_ensemble,
    load_reward_model,
    load_sequence_classifier,
    load_tokenizer,
)
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.scoring import (
    RewardScorer,
    calibrate_scores,
    ensemble_members,
    member_scores,
    reward_scores,
    set_calibration,
)
from stages.reward.__main__ import main
from stages.reward.saving import join_ensemble, save_ensemble
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
    first.config.ensemble_mean, first.config.ensemble_std = 0.25, 0.5
    model, wanted = (
        attach_ensemble(first, others),
        pytest.approx([0.5 + 2.0 * (x - 0.25) / 0.5 for x in expected[reduce]], abs=1e-5),
    )
    assert reward_scores(model, WHOLE).tolist() == wanted
    # evaluation and PPO get the same scores
    lm = tiny_lm()
    scored = score_responses(
        [Response(*ids, "", True) for ids in zip(PROMPTS, RESPONSES, strict=True)],
        None,
        lambda: nullcontext(lm),
        SimpleNamespace(eos_token_id=2),
        reward_model=model,
        temperature=1.0,
    )
    assert [2.0 * response.score + 0.5 for response in scored] == wanted


@pytest.mark.parametrize("reduce", list(Reduce))
def test_a_joined_ensemble_has_the_unit_of_one_reward_model(trio, reduce):
    """The mean and the minimum of standardised scores have another standard deviation than 1."""
    models, _ = trio
    raw = torch.stack([member_scores(model, WHOLE) for model in models])
    for model, scores in zip(models, raw, strict=True):
        set_calibration(model, scores)
    standardised = (raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)
    reduced = standardised.mean(0) if reduce is Reduce.mean else standardised.amin(0)
    assert abs(float(reduced.std()) - 1) > 0.05
    model = join_ensemble(models, reduce, WHOLE)
    scores = calibrate_scores(reward_scores(model, WHOLE), model)
    expected = (reduced - reduced.mean()) / reduced.std()
    assert scores.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert join_ensemble(models[1:2], reduce, WHOLE) is models[1]


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
    mean, std = one.config.ensemble_mean, one.config.ensemble_std
    assert scores["chosen"] == pytest.approx(((a + b) / 2 - mean) / std, abs=1e-3)
    demonstrations = read_jsonl(Path("rounds/r0/prepare/data/sft_eval.jsonl"), "")
    unit = RewardScorer(MODEL, params)(
        [row["prompt"] for row in demonstrations], [row["completion"] for row in demonstrations]
    )
    assert fmean(unit) == pytest.approx(0, abs=1e-3) and stdev(unit) == pytest.approx(1, abs=1e-3)
    scorer = RewardScorer(MODEL, params)
    assert scorer.scores_per_member([ids[0].tolist()]).squeeze(1).tolist() == pytest.approx(
        [a, b], abs=1e-4
    )
    # saving fewer members removes the others
    save_ensemble(load_sequence_classifier(SECOND, params.model), tokenizer, MODEL)
    assert (
        not (MODEL / "members").exists()
        and len(ensemble_members(load_reward_model(MODEL, params.model))) == 1
    )
