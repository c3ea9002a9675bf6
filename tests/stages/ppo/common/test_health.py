"""Each sign on a synthetic run with just that problem, and on a healthy run."""

import pytest

from stages.lib.core.params.policy import PpoParams
from stages.ppo.common.health import DANGER, HEALTH_CHECKS, KL_ABOVE_BUDGET, WARN, Monitor

PARAMS = PpoParams(max_kl_per_token=0.5, min_kl_per_token=0.001, kl_patience=5, warmup_updates=2)
UPDATES = 20


def healthy(update: int) -> dict[str, float]:
    """The score rises, KL rises to 0.4, all else drifts a little, as in the default run."""
    share = update / UPDATES
    return {
        "step": update,
        "reward_mean": -1.5 + 2.0 * share,
        "reward_std": 1.2,
        "kl_per_token": 0.4 * share,
        "entropy": 4.8 - 1.2 * share,
        "distinct_2": 0.97 - 0.05 * share,
        "ending_share": 0.06 + 0.06 * share,
        "score_judge_correlation": 0.5 - 0.05 * share,
        "judge_score_mean": 0.3 + 0.4 * share,
        "judge_score_std": 0.4,
        "response_length": 17.0 - 4.0 * share,
        "repetition_3": 0.01,
        "value_loss": 0.5,
        "clip_fraction": 0.08,
        "validation_gain_z": 2.0 * share,
    }


def monitor_run(change=lambda share: {}, params: PpoParams = PARAMS) -> Monitor:
    """A monitor after a healthy run with changed metrics, by the share of the run that is done."""
    monitor = Monitor(params)
    steps = []
    for update in range(1, UPDATES + 1):
        steps.append(healthy(update) | change(update / UPDATES))
        monitor.check(steps)
    return monitor


def test_a_healthy_run_has_no_findings():
    monitor = monitor_run()
    assert monitor.findings == [] and monitor.verdict == "healthy"


# by the sign that reports it: the changed metrics, and the worst verdict
PROBLEMS = {
    "kl above budget": (lambda share: {"kl_per_token": 0.8 * share}, DANGER),
    "no movement": (lambda share: {"kl_per_token": 0.0005}, DANGER),
    "reward does not move": (lambda share: {"reward_mean": -1.5}, WARN),
    "entropy collapse": (lambda share: {"entropy": 4.8 - 4.0 * share}, DANGER),
    "one text for all prompts": (lambda share: {"distinct_2": 0.97 - 0.6 * share}, DANGER),
    "one ending for all prompts": (lambda share: {"ending_share": 0.06 + 0.6 * share}, DANGER),
    "reward and judge diverge": (
        lambda share: {
            "score_judge_correlation": 0.5 - 0.45 * share,
            "judge_score_mean": 0.3,
        },
        DANGER,
    ),
    "judge prefers SFT": (lambda share: {"validation_gain_z": -4.0 * share}, DANGER),
    "length hack": (lambda share: {"response_length": 12 + 12 * share}, DANGER),
    "repetition": (lambda share: {"repetition_3": 0.01 + 0.3 * share}, DANGER),
    "value loss explodes": (lambda share: {"value_loss": 0.5 if share < 0.8 else 50.0}, DANGER),
    "clips too much": (lambda share: {"clip_fraction": 0.8}, DANGER),
    "clips nothing": (lambda share: {"clip_fraction": 0.0}, WARN),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_reported_and_no_other(name):
    change, worst_verdict = PROBLEMS[name]
    monitor = monitor_run(change)
    assert {finding.sign for finding in monitor.findings} == {name}
    assert monitor.verdict == worst_verdict


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_settings_mean_the_same_at_24_and_at_512_tokens(name):
    """Lengths, and KL per sequence, are in proportion to `response_length`."""

    def findings(tokens):
        def change(share):
            row = healthy(share * UPDATES) | PROBLEMS[name][0](share)
            length = row["response_length"] * tokens / 24
            return row | {"response_length": length, "kl": row["kl_per_token"] * length}

        params = PARAMS.model_copy(update={"response_length": tokens})
        return [(f.sign, f.verdict, f.update) for f in monitor_run(change, params).findings]

    assert findings(24) == findings(512) != []


def test_every_sign_has_a_problem():
    assert {sign.name for sign in HEALTH_CHECKS} == set(PROBLEMS)


def test_a_sign_is_reported_as_a_warning_then_as_a_danger_and_not_again():
    findings = monitor_run(PROBLEMS["entropy collapse"][0]).findings
    assert [finding.verdict for finding in findings] == [WARN, DANGER]
    assert findings[0].update < findings[1].update
    # entropy 4.8 - 0.2 per update: the mean of the first 5 is 4.2, and that of the last 5 is below
    # half of it from update 16 on (4.8 - 0.2 * 14 = 2.0)
    assert findings[0].update == 16 and findings[0].value == pytest.approx(2.0 / 4.2)


def test_dangers_are_counted_up_to_an_update_and_warnings_are_not():
    monitor = monitor_run(lambda share: {"entropy": 4.8 - 4.0 * share, "clip_fraction": 0.8})
    # the clip fraction is above 0.6 as soon as it can be read, at 10. Entropy falls by 0.2 per
    # update, its first mean is 4.2, its last one 4.8 - 0.2 * (n - 2): a warning below 2.1 (n = 16),
    # a danger below 1.47 (n = 19)
    assert [monitor.dangers(update) for update in (9, 10, 18, 19)] == [0, 1, 1, 2]


def test_a_kl_above_the_budget_is_no_danger_of_the_selected_policy():
    monitor = monitor_run(lambda share: {"kl_per_token": 9.0})
    assert [finding.sign for finding in monitor.findings] == [KL_ABOVE_BUDGET]
    assert monitor.dangers(UPDATES) == 0


def test_a_judge_that_prefers_sft_while_the_reward_falls_is_no_hack():
    change = {"reward_mean": -1.5, "validation_gain_z": -4.0}
    findings = monitor_run(lambda share: change | {"reward_mean": -1.5 - share}).findings
    assert "judge prefers SFT" not in {finding.sign for finding in findings}


def test_the_gain_over_sft_is_read_in_standard_errors():
    """-0.21 standard errors per update: -2.1 at update 10, -3.15 at 15."""
    findings = monitor_run(lambda share: {"validation_gain_z": -4.2 * share}).findings
    assert [(finding.update, finding.verdict) for finding in findings] == [(10, WARN), (15, DANGER)]
    assert findings[0].value == pytest.approx(-2.1)


def test_kl_that_returns_to_its_budget_in_time_is_no_danger():
    def spikes(share):
        return {"kl_per_token": 0.6 if round(share * UPDATES) % 5 else 0.4}

    assert monitor_run(spikes).findings == []


def test_one_step_per_rollout_has_nothing_to_clip():
    params = PARAMS.model_copy(update={"num_ppo_epochs": 1})
    assert monitor_run(PROBLEMS["clips nothing"][0], params).findings == []


def test_a_length_that_grows_without_the_score_is_no_hack():
    monitor = monitor_run(
        lambda share: {"response_length": 12 + 12 * share, "reward_mean": -1.5 - share}
    )
    assert {finding.sign for finding in monitor.findings} == {"reward does not move"}


@pytest.mark.parametrize(("response_length", "verdict"), [(24, DANGER), (60, WARN), (160, "")])
def test_a_length_hack_takes_up_a_share_of_the_response_length(response_length, verdict):
    """From 12.6 tokens to 22.8 (means of 5 updates): 10.2 more, 42%, 17% and 6%."""
    params = PARAMS.model_copy(update={"response_length": response_length})
    monitor = monitor_run(lambda share: {"response_length": 12 + 12 * share}, params)
    verdicts = [finding.verdict for finding in monitor.findings]
    assert (verdicts or [""])[-1] == verdict


def test_signs_of_missing_metrics_are_left_out_and_the_fix_names_the_kl_key():
    monitor = Monitor(PpoParams(max_kl_per_token=1.0, kl_patience=2), kl_key="rloo.beta")
    steps = [{"step": step, "kl_per_token": 2.0} for step in range(1, 21)]
    assert [(finding.sign, finding.first_fix) for finding in monitor.check(steps)] == [
        ("kl above budget", "raise rloo.beta, lower ppo.learning_rate")
    ]
    assert monitor.report()["verdict"] == "danger"


def test_a_resumed_run_has_the_findings_of_the_steps_before() -> None:
    """Each at its own update: clips too much from the tenth, the earliest, and from the 20th."""
    steps = [
        healthy(update) | {"clip_fraction": 0.5, "repetition_3": 0.01 if update < 20 else 1.0}
        for update in range(1, 21)
    ]
    monitor, resumed = Monitor(PARAMS), Monitor(PARAMS)
    for number in range(1, len(steps) + 1):
        monitor.check(steps[:number])
    resumed.check_history(steps)
    assert resumed.findings == monitor.findings
    assert [(finding.sign, finding.update) for finding in resumed.findings] == [
        ("clips too much", 10),
        ("repetition", 20),
    ]


def test_a_finding_has_what_its_sign_says() -> None:
    """As health.json has it."""
    monitor = monitor_run(lambda share: {"repetition_3": 0.01 if share < 1 else 0.5})
    [sign] = [sign for sign in HEALTH_CHECKS if sign.name == "repetition"]
    report = monitor.report()
    assert report.keys() == {"verdict", "findings"} and report["verdict"] == monitor.verdict
    [finding] = report["findings"]
    assert finding["update"] == UPDATES
    names = ("metric", "threshold", "cause")
    assert [finding[name] for name in names] == [getattr(sign, name) for name in names]
