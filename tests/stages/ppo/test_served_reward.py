"""PPO without a reward model of its own: `rondo serve-reward` has it (`ppo.reward_url`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.serving.accepted_model import ServedModel
from flows.serving.scoring_queue import ScoringQueue
from stages.lib.core.errors import BadInput, RewardsFailed, Unreachable
from stages.lib.core.files import file_hash, read_json
from stages.lib.core.params import Params, check_params
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.__main__ import main as ppo
from stages.ppo.common.rewards import check_served_model
from stages.ppo.trainer import roles
from tests.flows.serving.conftest import serving
from tests.servers import NOWHERE

FOLDER = Path("rounds/r0/reward/model")


class Service:
    """The scores of the round's reward model, or what `spoil` makes of them."""

    def __init__(self, params: Params) -> None:
        self.scorer = RewardScorer(FOLDER, params)
        self.spoil: Any = lambda scores: scores

    def __call__(self, sequences: list[list[int]]) -> list[float]:
        return self.spoil(self.scorer.tokens(sequences))


@pytest.fixture
def local(make_round) -> Params:
    """Params of a run that loads the reward model."""
    made = make_round("r0", 1.0).model_dump(mode="json")
    sizes = dict.fromkeys(("batch_size", "mini_batch_size", "micro_batch_size"), 4)
    made["ppo"] |= {**sizes, "total_episodes": 8, "critic": "policy"}
    return check_params(made, "test")


@pytest.fixture
def service(local) -> Service:
    return Service(local)


@pytest.fixture
def url(service) -> Iterator[str]:
    served = ServedModel("reward@r0", str(FOLDER), file_hash(FOLDER), None, None, "passed", [])
    queue = ScoringQueue(service, 4096, 10**6)
    with serving(served, queue, service.scorer) as address:
        yield address


def with_url(params: Params, url: str, **ppo: Any) -> Params:
    values = params.model_dump(mode="json")
    values["ppo"] |= {"reward_url": url, **ppo}
    return check_params(values, "test")


def test_ppo_trains_on_the_services_scores_and_loads_no_reward_model(
    local, service, url, monkeypatch
):
    def refuse(*_: object) -> None:
        raise AssertionError("a reward model was loaded")

    monkeypatch.setattr(roles, "load_reward_model_for", refuse)
    ppo(with_url(local, url, score_clip=1.0, missing_eos_penalty=0.25), "r0")
    rows = list(read_rollouts(Path("rounds/r0/ppo/rollouts")))
    assert len(rows) == 8
    scores = service.scorer([row["prompt"] for row in rows], [row["response"] for row in rows])
    assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-3)  # rounded in the file
    assert len({round(score, 2) for score in scores}) > 3
    for row, score in zip(rows, scores, strict=True):
        shaped = min(max(score, -1), 1) - 0.25 * (row["finish_reason"] == "length")
        assert row["reward"] == pytest.approx(shaped, abs=1e-3)
    metrics = read_json(Path("rounds/r0/ppo/metrics.json"), "")
    assert metrics["reward_failed_share"] == 0
    assert "score_ppo.reward_url" not in metrics | rows[0]


def test_another_model_behind_the_address_is_refused(local, url):
    (FOLDER / "config.json").write_text((FOLDER / "config.json").read_text() + "\n")
    with pytest.raises(BadInput, match=r"ppo.reward_url .* serves another model .* than rounds"):
        ppo(with_url(local, url), "r0")


def test_another_model_after_the_check_is_refused(local, service, url, monkeypatch):
    """The service is started anew with another model before the first rollout."""
    queue = ScoringQueue(service, 4096, 10**6)
    other = ServedModel("reward@r9", str(FOLDER), "ab12", None, None, "passed", [])
    health = check_served_model(url, FOLDER)
    with serving(other, queue, service.scorer) as address:
        monkeypatch.setattr("stages.ppo.__main__.check_served_model", lambda *_: health)
        with pytest.raises(RewardsFailed, match=r"ppo\.reward_url: .* now states reward@r9"):
            ppo(with_url(local, address), "r0")


@pytest.mark.parametrize("path", ["", "/get_reward"])
def test_no_service_at_the_address_is_named(local, url, path, monkeypatch):
    monkeypatch.setattr("stages.lib.core.http_session.BACKOFF_SECONDS", 0.0)
    address = url + path if path else NOWHERE
    with pytest.raises(Unreachable, match=f"ppo.reward_url {address}: no answer of `rondo serve"):
        ppo(with_url(local, address), "r0")


def test_a_service_that_fails_stops_the_run_before_the_update(local, service, url, monkeypatch):
    monkeypatch.setattr("stages.lib.core.http_session.BACKOFF_SECONDS", 0.0)
    service.spoil = lambda scores: [float("nan")] * len(scores)
    with pytest.raises(RewardsFailed, match=r"4 of 4 rewards failed, ppo\.reward_url: http"):
        ppo(with_url(local, url), "r0")


def test_settings_that_need_the_model_are_refused(local):
    with pytest.raises(BadInput, match=r"ppo: .*reward_url: .* set critic to policy"):
        with_url(local, "http://a:1", critic="reward")
    values = with_url(local, "http://a:1").model_dump(mode="json") | {"algorithm": "rloo"}
    with pytest.raises(BadInput, match=r"ppo.reward_url: only ppo is served, not rloo: set"):
        check_params(values, "test")


def test_the_token_goes_to_the_servers_that_pyproject_lists(local, service, monkeypatch):
    served = ServedModel("reward@r0", str(FOLDER), file_hash(FOLDER), None, None, "passed", [])
    queue = ScoringQueue(service, 4096, 10**6)
    monkeypatch.setenv("RONDO_REWARD_TOKEN", "secret")
    monkeypatch.setattr("stages.lib.core.http_session.BACKOFF_SECONDS", 0.0)
    with serving(served, queue, service.scorer, token="secret") as url:
        with pytest.raises(RewardsFailed, match=r"401.*the token is missing or wrong"):
            ppo(with_url(local, url), "r0")
        Path("pyproject.toml").write_text(
            f'[tool.rondo.api_keys]\nRONDO_REWARD_TOKEN = ["{url}"]\n'
        )
        ppo(with_url(local, url), "r0")
    assert len(list(read_rollouts(Path("rounds/r0/ppo/rollouts")))) == 8
