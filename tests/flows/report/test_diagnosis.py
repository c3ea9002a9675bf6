"""The stage at fault, how sure that is, and the next step, from files in the stages' format."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.core.config import options_of, resolve
from flows.core.locks import Locks
from flows.execution.worktree import COMPLETE
from flows.report import diagnosis
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params import Params, load_params
from tests.flows.report.reading import all_ran
from tests.verdicts import failed_check, passed_check

LOCKS: Locks = all_ran(*(f"r{number}" for number in range(6)))
VALUES = {
    "prepare": {"eval_prompts": 88},
    "reward": {"accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.79, "pairs": 308},
    "evaluate": {"win_rate": 0.81, "win_rate_low": 0.75, "win_rate_high": 0.86, "prompts": 88},
}
EQUAL_KL = "win_rate_champion_equal_kl"


ACCURACY = failed_check("reward.accuracy_low", 0.7, ">= 0.8")


def write_verdict(
    round_: str,
    gate: str,
    *failed: dict[str, Any],
    policy: str = "block",
    approval: dict[str, Any] | None = None,
) -> None:
    approved = bool(approval and approval["approved"])
    passing = passed_check("reward.accuracy_low", 0.7, ">= 0.8")
    write_json(
        Path(f"reports/{round_}/gate_{gate}.json"),
        {
            "gate": gate,
            "round": round_,
            "policy": policy,
            "passed": not failed,
            "may_continue": not failed or policy == "warn" or approved,
            "approval": approval,
            "checks": [*failed, passing],
        },
    )


def write_metrics(round_: str, **more: dict[str, Any]) -> None:
    for stage, values in (VALUES | more).items():
        write_json(stage_dir(round_, stage) / "metrics.json", values)


def write_gates(round_: str, failing: dict[str, list[dict[str, Any]]], policy: str) -> None:
    for gate in ("sft", "reward", "promote"):
        write_verdict(round_, gate, *failing.get(gate, []), policy=policy)


@pytest.fixture(autouse=True)
def folder(project: Path) -> Path:
    write_metrics("r0")
    return project


def line(round_: str = "r0") -> str:
    [text] = diagnosis.verdict_lines([round_], LOCKS)
    return text


FAILED = "it is bad (the reward.accuracy_low, low end: 0.7, wanted >= 0.8)"
AGAIN = "Look at the data. Then run again: `rondo run`"


def test_all_gates_passed() -> None:
    write_gates("r0", {}, "block")
    assert line() == "r0: all gates passed"
    assert not diagnosis.gates_failed(["r0"], LOCKS)


def test_a_gate_that_stopped_the_run() -> None:
    write_verdict("r0", "sft")
    write_verdict("r0", "reward", ACCURACY)
    assert line() == f"r0: the reward model is at fault: {FAILED}. {AGAIN}"
    assert diagnosis.gates_failed(["r0"], LOCKS)


def test_with_warn_the_first_failed_gate_is_at_fault_first_and_the_others_are_named() -> None:
    write_gates("r0", {key: [ACCURACY] for key in ("sft", "reward", "promote")}, "warn")
    assert line() == (
        f"r0: SFT is at fault first: {FAILED}. {AGAIN}. "
        f"Also at fault: the reward model: {FAILED}. Also at fault: PPO: {FAILED}"
    )
    assert diagnosis.gates_failed(["r0"], LOCKS)
    write_gates("r0", {"promote": [ACCURACY]}, "warn")
    assert line() == f"r0: PPO is at fault: {FAILED}. {AGAIN}"


def test_the_first_of_several_failed_checks_is_the_cause() -> None:
    other = failed_check("reward.ece", 0.5, "<= 0.1", fault="its confidence is wrong")
    write_verdict("r0", "sft")
    write_verdict("r0", "reward", other, ACCURACY)
    write_metrics("r0", reward=VALUES["reward"] | {"ece": 0.5})
    cause = "its confidence is wrong (the reward.ece: 0.5, wanted <= 0.1, and 1 more failed)"
    assert line() == f"r0: the reward model is at fault: {cause}. {AGAIN}"


def test_what_a_person_approved_is_no_fault() -> None:
    approval = {"approved": True, "by": "Ada", "reason": "seen by hand", "failed": {}}
    write_verdict("r0", "sft", ACCURACY, policy="ask", approval=approval)
    assert line() == (
        "r0: not finished: the reward gate was not reached. sft gate: approved by Ada: seen by hand"
    )
    assert not diagnosis.gates_failed(["r0"], LOCKS)
    refusal = approval | {"approved": False}
    write_verdict("r0", "sft", ACCURACY, policy="ask", approval=refusal)
    assert line() == f"r0: SFT is at fault: {FAILED}. {AGAIN}"


def test_a_verdict_about_other_numbers_does_not_count() -> None:
    write_verdict("r0", "sft", ACCURACY | {"value": 0.6})
    assert line() == "r0: not finished: the sft gate was not reached"


@pytest.mark.parametrize(
    ("manifest", "name"),
    [({}, "PPO"), ({"algorithm": "dpo"}, "DPO"), ({"algorithm": "best_of_n"}, "best-of-n")],
)
def test_the_algorithm_that_trained_the_policy_is_at_fault(
    manifest: dict[str, str], name: str
) -> None:
    write_gates("r0", {"promote": [ACCURACY]}, "block")
    write_json(stage_dir("r0", "ppo") / "manifest.json", manifest)
    assert line().startswith(f"r0: {name} is at fault: ")


def test_a_policy_that_does_not_beat_the_champion_is_nobodys_fault() -> None:
    lost = failed_check("evaluate.win_rate_champion_low", 0.36, ">= 0.38")
    far = failed_check("evaluate.ppo.kl_per_token", 0.9, "<= 0.6")
    values = {"win_rate_champion_low": 0.36, "ppo": {"kl_per_token": 0.9}}
    write_metrics("r0", evaluate=VALUES["evaluate"] | values)
    write_gates("r0", {"promote": [lost]}, "block")
    assert line().startswith("r0: not promoted, the champion stays: it is bad (")
    write_gates("r0", {"promote": [lost, far]}, "block")
    assert line().startswith("r0: PPO is at fault: it is bad (")


@pytest.mark.parametrize(
    ("mean", "before", "after", "cause", "command"),
    [
        (
            0.45,
            -0.5,
            1.25,
            "the reward model's score rose from -0.50 to 1.25, and the judges do not prefer its "
            "responses: it may exploit the reward model",
            "rondo next-round",
        ),
        (
            0.5,
            0.5,
            0.25,
            "the reward model's score, which it maximises, did not rise: from 0.50 to 0.25",
            "rondo run",
        ),
        (0.45, None, None, "it is bad", "rondo run"),  # there is no reward model
        (0.55, -0.5, 1.25, "it is bad", "rondo run"),  # it won, on too few prompts
    ],
)
def test_a_policy_that_lost_has_learnt_the_wrong_thing_or_nothing(
    mean: float, before: float | None, after: float | None, cause: str, command: str
) -> None:
    lost = failed_check("evaluate.win_rate_low", 0.4, "> 0.5")
    scores = {"sft": {"score": before}, "ppo": {"score": after}} if before is not None else {}
    lower = {"win_rate": mean, "win_rate_low": 0.4}
    write_metrics("r0", evaluate=VALUES["evaluate"] | lower | scores)
    write_gates("r0", {"promote": [lost]}, "warn")
    answer = diagnosis.answer("r0", LOCKS)
    assert (answer.faults[0].cause, answer.command) == (cause, command)


def test_the_first_round_that_is_not_complete_decides() -> None:
    for name in ("r0", "r1"):
        write_metrics(name)
        write_gates(name, {}, "block")
    assert diagnosis.headline([], LOCKS) == "No stage has results yet."
    assert diagnosis.headline(["r0"], LOCKS) == "all gates passed"
    assert diagnosis.deciding_round(["r0", "r1", "r2"], LOCKS) == "r2"
    assert diagnosis.headline(["r0", "r1"], LOCKS) == "r1: all gates passed"
    Path("reports/r0/gate_promote.json").unlink()
    unfinished = "r0: not finished: the promote gate was not reached"
    assert diagnosis.headline(["r0", "r1"], LOCKS) == unfinished


@pytest.mark.parametrize(
    ("setting", "here", "isolated"),
    [
        ("sft.max_steps=8", "rondo run --set sft.max_steps=8", "--set sft.max_steps=8"),
        ("", "rondo run", ""),
    ],
)
def test_the_command_is_right_for_the_folder_of_the_run(
    setting: str, here: str, isolated: str
) -> None:
    """An isolated run has its own settings: a new one begins with them."""
    values = resolve("smoke", 1, ["ppo.kl_coef=0.2"]).model_dump(mode="json")
    write_text(Path("params.yaml"), json.dumps(values, ensure_ascii=False))
    write_verdict("r0", "sft", ACCURACY | {"setting": setting})
    answer = diagnosis.answer("r0", LOCKS)
    assert answer.command == here
    change = "Try sft.max_steps 8 instead of 4"
    assert answer.next_step == (change if setting else "Look at the data. Then run again")
    write_text(COMPLETE, "")
    command = "rondo run --isolated --preset smoke --rounds 1 --set ppo.kl_coef=0.2 " + isolated
    assert diagnosis.answer("r0", LOCKS).command == command.strip()


def test_the_commands_of_a_run_without_a_fault(folder: Path) -> None:
    def commands() -> list[str]:
        return [diagnosis.answer(name, LOCKS).command for name in ("r0", "r1")]

    write_gates("r0", {}, "block")
    assert commands() == ["rondo next-round", "rondo run"]
    write_text(COMPLETE, "")
    run = folder.name
    merged = f"git merge runs/{run} && rondo next-round"
    assert commands() == [merged, f"rondo run --continue {run}"]


def test_an_ended_round_runs_again_only_if_it_is_named() -> None:
    write_text(
        Path("rounds/r0/params.yaml"),
        json.dumps(Params().model_dump(mode="json"), ensure_ascii=False),
    )
    failing = ACCURACY | {"setting": "sft.max_steps=8"}
    write_gates("r0", {"sft": [failing]}, "warn")
    assert diagnosis.answer("r0", LOCKS).command == "rondo run --rerun r0 --set sft.max_steps=8"


ENDS = {"accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.79}


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (ENDS, "Sure: the whole interval is below 0.8: 0.750 [0.700, 0.790]"),
        (
            ENDS | {"accuracy_high": 0.82},
            "Likely: the mean fails, the upper end of the interval does not: 0.750 [0.700, 0.820]",
        ),
        (
            ENDS | {"accuracy": 0.81, "accuracy_high": 0.9},
            "Not sure: the mean passes, the lower end of the interval does not: "
            "0.810 [0.700, 0.900]",
        ),
    ],
)
def test_how_sure_a_failed_lower_end_is(ends: dict[str, float], words: str) -> None:
    write_metrics("r0", reward={"pairs": 308} | ends)
    write_verdict("r0", "reward", ACCURACY)
    certainty = diagnosis.answer("r0", LOCKS).certainty
    assert certainty == f"{words}, 95% interval on 308 held-out pairs"


def test_how_sure_other_answers_are() -> None:
    write_verdict("r0", "reward", failed_check("reward.ece", 0.5, "<= 0.1"))
    write_metrics("r0", reward=VALUES["reward"] | {"ece": 0.5})
    assert diagnosis.answer("r0", LOCKS).certainty == (
        "Far from its threshold, but one number on 308 held-out pairs without an interval: the "
        "same run with another seed (`--set seed=1`) shows its noise"
    )
    write_verdict("r0", "reward", failed_check("reward.ece", 0.15, "<= 0.1"))
    write_metrics("r0", reward=VALUES["reward"] | {"ece": 0.15})
    assert diagnosis.answer("r0", LOCKS).certainty.startswith("Close to its threshold")
    jury = {"jury": {"alone": {"lexicon": {}, "fluency": {}}}}
    write_metrics("r0", evaluate=VALUES["evaluate"] | jury)
    write_gates("r0", {}, "block")
    assert diagnosis.answer("r0", LOCKS).certainty == (
        "Sure: win rate against SFT 0.810 [0.750, 0.860], 95% interval on 88 prompts, by the "
        "judges fluency and lexicon. One training run: another seed gives another policy"
    )
    assert diagnosis.answer("r5", LOCKS).certainty == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.51, 0.7, "Sure: win rate"),
        (0.5, 0.7, "Not sure that it beats SFT: win rate"),
        (0.3, 0.49, "Sure: win rate"),
    ],
)
def test_a_win_rate_whose_interval_has_a_half_is_not_sure(
    low: float, high: float, expected: str
) -> None:
    ends = {"win_rate_low": low, "win_rate_high": high}
    write_metrics("r0", evaluate=VALUES["evaluate"] | ends)
    write_gates("r0", {}, "block")
    assert diagnosis.answer("r0", LOCKS).certainty.startswith(expected)


@pytest.mark.parametrize(
    ("low", "high", "needed", "verdict"),
    [
        (0.51, 0.62, None, "helped (win rate 0.550 [0.510, 0.620])"),
        (0.38, 0.49, None, "hurt (win rate 0.550 [0.380, 0.490])"),
        (
            0.49,
            0.6,
            230,
            "no difference shown (win rate 0.550 [0.490, 0.600]; about 230 prompts would decide, "
            "not 88)",
        ),
        (0.5, 0.5, None, "no difference shown (win rate 0.550 [0.500, 0.500])"),
    ],
)
def test_whether_a_round_helped_at_equal_kl(
    low: float, high: float, needed: int | None, verdict: str
) -> None:
    values = {"": 0.55, "_low": low, "_high": high, "_prompts_needed": needed}
    equal_kl = {f"{EQUAL_KL}{end}": value for end, value in values.items()}
    write_metrics("r1", evaluate=VALUES["evaluate"] | {"champion_round": "r0"} | equal_kl)
    assert "at equal KL" not in line("r0").lower()
    assert line("r1").endswith(f". At equal KL, r1 against r0: {verdict}")


def test_a_jury_that_labelled_the_reward_models_pairs_is_no_proof_that_a_round_helped() -> None:
    equal_kl = {f"{EQUAL_KL}{end}": 0.6 for end in ("", "_low", "_high")}
    evaluate = VALUES["evaluate"] | {"champion_round": "r0"} | equal_kl
    # the pairs of r1 are for r2's reward model
    for name, pairs in {"r0": 382, "r1": 100}.items():
        write_metrics(name, evaluate=evaluate, replay={"policy_pairs": pairs})
    caution = "But the jury labelled 382 pairs that its reward model learnt from"
    assert caution in line("r1")
    worse = {f"{EQUAL_KL}{end}": 0.4 for end in ("", "_low", "_high")}
    write_metrics("r1", evaluate=evaluate | worse)
    assert "But the jury" not in line("r1")


@pytest.mark.parametrize(
    ("start", "caution"),
    [
        (
            "rounds/r0/ppo/policy",
            ". Its PPO continued from rounds/r0/ppo/policy, so the policy had more updates"
            " (docs/rounds.md)",
        ),
        ("rounds/r1/sft/model", ""),
    ],
)
def test_a_policy_that_went_on_from_the_champion_had_more_updates(start: str, caution: str) -> None:
    equal_kl = {f"{EQUAL_KL}{end}": 0.6 for end in ("", "_low", "_high")}
    write_metrics("r1", evaluate=VALUES["evaluate"] | {"champion_round": "r0"} | equal_kl)
    write_json(stage_dir("r1", "ppo") / "manifest.json", {"started_from": start})
    assert line("r1").endswith(f"helped (win rate 0.600 [0.600, 0.600]){caution}")


def test_the_options_of_a_run_give_its_params() -> None:
    changed = ["algorithm=dpo", "sft.max_steps=5", "battery.endings=['no', true1]", "seed=7"]
    params = resolve("tiny", 2, changed)
    options = options_of(params)
    assert options[:4] == ["--preset", "tiny", "--rounds", "2"]
    settings = [word for word in options[4:] if word != "--set"]
    assert sorted(settings) == [
        "algorithm=dpo",
        'battery.endings=["no", "true1"]',
        "seed=7",
        "sft.max_steps=5",
    ]
    assert resolve("tiny", 2, settings) == params
    write_text(
        Path("params.yaml"), json.dumps(Params().model_dump(mode="json"), ensure_ascii=False)
    )
    assert options_of(load_params()) == ["--preset", "default", "--rounds", "2"]


@pytest.mark.parametrize(
    ("efficiency", "expected"),
    [
        ([0.4, 0.3, 0.5], "paid 2.5 times the KL at which best-of-n of SFT has its reward (KL"),
        ([0.4, 0.3, 0.5], ": its training limits it more than the reward model"),
        ([0.8, 0.7, 0.9], "paid 1.2 times"),
        ([0.8, 0.7, 0.9], ": the reward model limits it more than its training"),
        ([0.0, 0.0, 0.0], "PPO paid 6.8 nats for no reward"),
    ],
)
def test_what_limits_the_policy(efficiency: list[float], expected: str) -> None:
    names = ("kl_efficiency", "kl_efficiency_low", "kl_efficiency_high")
    values = VALUES["evaluate"] | dict(zip(names, efficiency, strict=True)) | {"ppo": {"kl": 6.8}}
    write_metrics("r0", evaluate=values)
    write_gates("r0", {}, "block")
    assert expected in line()


def test_without_a_kl_efficiency_nothing_is_said_of_limits() -> None:
    write_metrics("r0", evaluate=VALUES["evaluate"] | {"kl_efficiency": None})
    write_gates("r0", {}, "block")
    assert "limits" not in line() and "paid" not in line()
