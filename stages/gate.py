"""Quality gates: `python -m stages.gate --gate sft|reward|promote --round r0`.

gates/<round>/<gate>.ok is written on pass alone, so that neither `dvc repro` nor the flow goes past a failed gate (but nothing
depends on `promote`: a policy that was hacked is what the next round learns from). The verdict with its numbers goes to
reports/<round>/gate_<gate>.json either way. No model is loaded here.
"""

import argparse
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

from stages.errors import BadInput, GateFailed, RondoError
from stages.params import GatesParams, Params, load_params
from stages.records import GATES, REPORTS, read_json, stage_dir, write_json, write_text

COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
STAGE = {"sft": "sft", "reward": "reward", "promote": "evaluate"}
Check = dict[str, Any]
EPOCHS = "reward.num_train_epochs, in later rounds reward.continue_epochs"


def number(metrics: Any, name: str) -> float:
    """The metric at a dotted name; NaN, which passes no check, where it is missing or no number."""
    for key in name.split("."):
        metrics = metrics.get(key) if isinstance(metrics, dict) else None
    return float(metrics) if isinstance(metrics, int | float) and not isinstance(metrics, bool) else math.nan


def check(name: str, value: float, compare: str, bound: float, next_step: str) -> Check:
    """One check; NaN or infinity on either side fails it."""
    finite = math.isfinite(value) and math.isfinite(bound)
    if not finite:
        next_step = f"{name} is missing or not finite: look for NaN in the stage's metrics.jsonl, lower its learning rate"
    return {
        "metric": name,
        "value": value if math.isfinite(value) else None,
        "band": f"{compare} {bound:.4g}",
        "passed": finite and COMPARE[compare](value, bound),
        "next_step": next_step,
    }


def sft_checks(metrics: Any, gates: GatesParams, round_: str) -> list[Check]:
    return [
        check(
            "loss_before - loss_after",
            number(metrics, "loss_before") - number(metrics, "loss_after"),
            ">=",
            gates.sft.loss_drop,
            f"SFT learnt too little: look at rounds/{round_}/sft/samples.jsonl and curves.csv, raise sft.num_train_epochs (in later rounds "
            "sft.continue_epochs) or sft.learning_rate, or add demonstrations",
        )
    ]


def reward_checks(metrics: Any, gates: GatesParams, round_: str) -> list[Check]:
    accuracy, data = number(metrics, "accuracy"), f"reports/{round_}/data.json"
    return [
        check(
            "accuracy_low",
            number(metrics, "accuracy_low"),
            ">=",
            gates.reward.accuracy,
            f"look at {data} for bad labels and too few pairs, add pairs or epochs ({EPOCHS})",
        ),
        check(
            "margin",
            number(metrics, "margin"),
            ">=",
            gates.reward.margin,
            f"chosen and rejected score alike: raise {EPOCHS}, or reward.learning_rate",
        ),
        check(
            "accuracy - baseline_longest",
            accuracy - number(metrics, "baseline_longest"),
            ">",
            gates.reward.baseline_lead,
            f"length alone does as well: the labels follow length; balance the lengths of chosen and rejected ({data})",
        ),
        check(
            "accuracy - baseline_tfidf",
            accuracy - number(metrics, "baseline_tfidf"),
            ">",
            gates.reward.baseline_lead,
            f"counting words does as well: look for label shortcuts in {data}, add pairs or epochs ({EPOCHS})",
        ),
    ]


def promote_checks(metrics: Any, gates: GatesParams, round_: str) -> list[Check]:
    bands, samples = gates.promote, f"rounds/{round_}/evaluate/samples.jsonl"
    return [
        check(
            "win_rate_low",
            number(metrics, "win_rate_low"),
            ">",
            bands.win_rate,
            "the policy does not beat SFT clearly enough: if ppo score_mean rose, the reward model was hacked "
            f"(read {samples}, run the next round on its replay: `dvc repro gate_promote@<next round>`); if it did not, lower ppo.kl_coef "
            "or raise ppo.total_episodes",
        ),
        check(
            "ppo.kl",
            number(metrics, "ppo.kl"),
            "<=",
            bands.max_kl,
            "too far from SFT: lower ppo.target_kl, raise ppo.kl_coef, or promote an earlier checkpoint (evaluate/curves.csv)",
        ),
        check(
            "ppo.distinct_2",
            number(metrics, "ppo.distinct_2"),
            ">=",
            bands.distinct_2,
            f"one template for all prompts (mode collapse; see {samples}): raise ppo.kl_coef or ppo.entropy_coef, lower ppo.learning_rate",
        ),
        check(
            "ppo.repetition_3",
            number(metrics, "ppo.repetition_3"),
            "<=",
            number(metrics, "sft.repetition_3") + bands.repetition_rise,
            f"texts repeat themselves (see {samples}): raise ppo.kl_coef, lower ppo.learning_rate or ppo.response_length",
        ),
    ]


CHECKS = {"sft": sft_checks, "reward": reward_checks, "promote": promote_checks}


def run_gate(params: Params, gate: str, round_: str) -> None:
    """Check, report, and open the gate.

    Raises:
        BadInput: the stage before has written no metrics.
        GateFailed: names each failed check with its numbers and next step.
    """
    stage, passage = STAGE[gate], GATES / round_ / f"{gate}.ok"
    passage.unlink(missing_ok=True)
    metrics = read_json(stage_dir(round_, stage) / "metrics.json", f"dvc repro {stage}@{round_}")
    checks = CHECKS[gate](metrics, params.gates, round_)
    failed = [row for row in checks if not row["passed"]]
    write_json(REPORTS / round_ / f"gate_{gate}.json", {"gate": gate, "round": round_, "passed": not failed, "checks": checks})
    for row in checks:
        print(f"[gate_{gate}@{round_}] {'pass' if row['passed'] else 'FAIL'}  {said(row)}", flush=True)
    if failed:
        raise GateFailed("; ".join(f"{said(row)}. Next: {row['next_step']}" for row in failed))
    write_text(passage, "passed\n")


def said(row: Check) -> str:
    return f"{row['metric']} {'missing' if row['value'] is None else format(row['value'], '.4g')}, wanted {row['band']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.gate")
    parser.add_argument("--gate", choices=sorted(CHECKS), required=True)
    parser.add_argument("--round", default="r0", help="round of params.yaml, e.g. r0")
    arguments = parser.parse_args()
    try:
        params = load_params()
        if arguments.round not in params.rounds:
            raise BadInput(f"--round {arguments.round}: not in params.yaml `rounds` ({', '.join(params.rounds)})")
        run_gate(params, arguments.gate, arguments.round)
    except RondoError as error:
        print(f"gate_{arguments.gate}@{arguments.round}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
