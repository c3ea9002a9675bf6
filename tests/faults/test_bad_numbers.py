"""Degenerate numbers: what a policy, a reward model and the gates make of NaN, infinity, responses
that are empty or never end, one score for all, and another vocabulary.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.serving.scoring_queue import NotFinite, ScoringQueue
from stages.gate.thresholds import THRESHOLDS
from stages.gate.thresholds.form import GATE_STAGES
from stages.gate.verdict import evaluate_gate
from stages.lib.core.errors import BadInput, Diverged, RondoError
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.params.shared import LoraParams
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import Comparison, Preference
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.scoring import RewardScorer
from stages.lib.metrics.stats import calibration, mean_with_error, pearson
from stages.lib.metrics.text import distinct_n, repetition_n
from stages.ppo.common.health import Monitor
from stages.ppo.trainer.roles import Roles, load_roles
from stages.ppo.trainer.update import PpoTrainer
from tests.stages.conftest import (  # noqa: F401 - fixtures
    always,
    made_rounds,
    make_round,
    tiny_folder,
)
from tests.stages.ppo.conftest import make_roles  # noqa: F401 - fixture

EOS, WORD = 2, 7
LENGTH = 6
SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "mini_batch_size": 8,
    "micro_batch_size": 4,
    "total_episodes": 120,
    "response_length": LENGTH,
    "num_ppo_epochs": 1,
}
PROMPTS = [({"id": f"p{i}", "prompt": f"{i}:"}, [5 + i, 6]) for i in range(8)]
RESPONSES = {
    "all EOS": lambda i: [EOS],
    "no EOS": lambda i: [WORD + i % 3] * LENGTH,
    "one token for all": lambda i: [WORD] * (LENGTH - 1) + [EOS],
    "one never ends": lambda i: [EOS] if i else [WORD] * LENGTH,
}


class FixedResponses(Roles):
    """In place of sampling: responses of one kind."""

    respond: Callable[[int], list[int]]
    scores: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda raw: raw)

    def sample(self, prompt_ids: Any, *_: Any) -> list[list[int]]:
        return [self.respond(index) for index in range(len(prompt_ids))]

    def raw_scores(self, *arguments: Any) -> Any:
        raw, states = super().raw_scores(*arguments)
        return self.scores(raw), states


def trainer_of(make: Any, kind: str, scores: Any = None, value_head: bool = False) -> PpoTrainer:
    roles = make(FixedResponses, lora=LoraParams(r=4), value_head=value_head)
    roles.respond = RESPONSES[kind]
    if scores:
        roles.scores = scores
    settings = {key: value for key, value in SETTINGS.items() if key in PpoParams.model_fields}
    return PpoTrainer(roles, PROMPTS, PpoParams(**settings), seed=0)


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("kind", RESPONSES)
def test_updates_on_degenerate_responses_are_finite(
    make_roles: Any,  # noqa: F811
    kind: str,
    value_head: bool,
) -> None:
    trainer = trainer_of(make_roles, kind, value_head=value_head)
    for _ in range(3):
        rollout, metrics = trainer.step()
        assert len(rollout.rows) == SETTINGS["batch_size"]  # no episode was left out
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        assert not bad
    assert all(torch.isfinite(p).all() for p in trainer.roles.policy.parameters())


def test_one_score_for_all_responses_is_no_update_by_noise(make_roles: Any) -> None:  # noqa: F811
    """The advantages have no variance; the health monitor says that the reward does not move."""
    trainer = trainer_of(make_roles, "no EOS", lambda raw: torch.full_like(raw, 3.0))
    steps = []
    for step in range(1, 16):
        _, metrics = trainer.step()
        assert all(map(math.isfinite, metrics.values()))
        steps.append({"step": step, **metrics})
    monitor = Monitor(trainer.params)
    monitor.check_history(steps)
    findings = [finding for finding in monitor.findings if finding.metric.startswith("reward_mean")]
    assert [finding.verdict for finding in findings] == ["warn"]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_score_that_is_not_finite_stops_the_run(make_roles: Any, bad: float) -> None:  # noqa: F811
    def spoil(raw: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(raw)) == 1, bad, raw)

    trainer = trainer_of(make_roles, "no EOS", spoil)
    before = [p.detach().clone() for p in trainer.roles.policy.parameters()]
    with pytest.raises(Diverged, match=r"raw_scores not finite.*rounds/<round>/reward"):
        trainer.step()
    assert all(map(torch.equal, before, trainer.roles.policy.parameters()))


def test_a_huge_score_is_clipped(make_roles: Any) -> None:  # noqa: F811
    trainer = trainer_of(make_roles, "no EOS", lambda raw: raw * 1e30)
    _, metrics = trainer.step()
    assert all(map(math.isfinite, metrics.values()))


def test_a_policy_of_nan_is_no_traceback(make_roles: Any) -> None:  # noqa: F811
    """Its probabilities cannot be sampled."""
    roles = make_roles(lora=LoraParams(r=4))
    settings = {key: value for key, value in SETTINGS.items() if key in PpoParams.model_fields}
    trainer = PpoTrainer(roles, PROMPTS, PpoParams(**settings), seed=0)
    with torch.no_grad():
        next(iter(roles.policy.parameters())).fill_(math.nan)
    with pytest.raises(RondoError, match="not finite"):
        trainer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5", True, [], {}])
@pytest.mark.parametrize("gate", sorted(THRESHOLDS))
def test_no_gate_passes_without_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str, value: Any
) -> None:
    """Each metric of each gate; null alone may mean `not measured`, if the threshold says so."""
    monkeypatch.chdir(tmp_path)
    for threshold in THRESHOLDS[gate]:
        for stage in GATE_STAGES[gate]:
            write_json(Path(f"rounds/r0/{stage}/metrics.json"), {})
        name = threshold.metric.split(" - ")[0]
        stage, *keys = name.split(".")
        metrics: Any = value
        for key in reversed(keys):
            metrics = {key: metrics}
        write_json(Path(f"rounds/r0/{stage}/metrics.json"), metrics)
        verdict = evaluate_gate(check_params({}, "test"), gate, "r0")
        rows = [row for row in verdict["checks"] if row["metric"] == threshold.metric]
        optional = [t.optional for t in THRESHOLDS[gate] if t.metric == threshold.metric]
        assert [row["passed"] for row in rows] == [value is None and may for may in optional], rows
        assert not verdict["passed"]
        json.dumps(verdict, allow_nan=False)


def test_judges_and_metrics_of_empty_responses() -> None:
    texts = ["", " ", "\n", "\u2028", "!!!", "a"]
    judge = LexiconJudge(tie_margin=0.05)
    pairs = [Comparison("", a, b) for a in texts for b in texts]
    for pair, verdict in zip(pairs, judge.compare(pairs), strict=True):
        assert verdict is not None
        assert verdict.preference is Preference.tie or pair.a != pair.b
    for group in ([], [""], ["", ""], texts):
        assert 0 <= distinct_n(group, 2) <= 1
    assert all(0 <= repetition_n(text, 3) <= 1 for text in texts)
    assert pearson([1.0, 1.0], [1.0, 2.0]) is None
    assert all(map(math.isfinite, mean_with_error([2.0, 2.0])))
    assert math.isfinite(calibration([0.0, 0.0, 0.0])[0])


def test_the_service_sends_no_score_that_is_not_finite() -> None:
    for bad in (math.nan, math.inf):
        queue = ScoringQueue(lambda sequences: [bad] * len(sequences), 100, 1000)  # noqa: B023
        [scores] = queue.submit([[1, 2]])
        with pytest.raises(NotFinite):
            scores.result(timeout=60)
        queue.close()


def test_a_reward_model_with_another_vocabulary(
    make_round: Callable[[str, float], Params],  # noqa: F811
) -> None:
    """PPO, and all that score by its texts, name both models; nothing is scored."""
    params = make_round("r0", 1.0)
    folder = Path("rounds/r0/reward/model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    tokenizer = load_tokenizer(Path("rounds/r0/sft/model"))
    message = r"reward/model: config\.json's vocab_size is 9, but the tokenizer of .* has \d+ tok"
    with pytest.raises(BadInput, match=message):
        load_roles(params, Path("rounds/r0/sft/model"), folder)
    with pytest.raises(BadInput, match=message):
        RewardScorer(folder, tokenizer, params)


def test_a_constant_reward_model_scores_all_alike(
    make_round: Callable[[str, float], Params],  # noqa: F811
) -> None:
    """Its training refuses it (tests/stages/reward/test_saving.py); an older one gives finite
    scores, and a best of n is the first sample.
    """
    params = make_round("r0", 0.0)
    tokenizer = load_tokenizer(Path("rounds/r0/sft/model"))
    scores = RewardScorer(Path("rounds/r0/reward/model"), tokenizer, params)(
        ["The dinner"] * 3, [" was good.", "", " " * 30]
    )
    assert len(set(scores)) == 1 and math.isfinite(scores[0])


def test_a_model_that_only_ends(
    tiny_folder: Path,  # noqa: F811
    always: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its responses are empty texts of one token, and its perplexities finite."""
    from stages.lib.lm.end_tokens import end_tokens
    from stages.lib.lm.generation import sample_responses

    params = check_params({"model": {"dtype": "float32", "threads": 1}}, "test")
    (tmp_path / "silent").mkdir()
    always("", tmp_path / "silent")
    model = load_causal_lm(tmp_path / "silent", params.model)
    tokenizer = load_tokenizer(tmp_path / "silent")
    prompts = [tokenizer(text).input_ids for text in ("The dinner", "The walk")]
    ppo = PpoParams(response_length=4)
    generator = torch.Generator().manual_seed(0)
    responses = sample_responses(model, tokenizer, prompts, ppo, generator, None)
    ends = end_tokens(model, tokenizer)
    assert all(len(response) == 1 and ends.end(response) for response in responses)
    assert tokenizer.batch_decode(responses, skip_special_tokens=True) == ["", ""]
