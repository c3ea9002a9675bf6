"""`rondo best`: the policies of all recorded runs, ranked by win rate against SFT, within a KL
budget.
"""

import math
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import mlflow
from mlflow.entities import LoggedModel
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.locks import digest_of, digests
from flows.core.tables import fitted_text, interval, short_hash, terminal_width
from flows.execution.worktree import WORKSPACES
from flows.tracking.records import lineage
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.recorder import read_metrics

COLUMNS = (
    "run",
    "round",
    "policy",
    "win rate against SFT [95%]",
    "KL, nats per token",
    "judge score",
    "seed",
    "git",
)
KEPT_COLUMNS = 5  # in a narrow terminal

TIE = 0.5  # the win rate of a policy that is as good as SFT
Experiment = tuple[str, str]  # evaluation and lineage


@dataclass(frozen=True)
class Policy:
    """A LoggedModel with the tag stage `ppo`: a selected policy or a checkpoint.

    recorded: its creation time, milliseconds. path: of its weights in the project.
    """

    name: str
    recorded: int
    path: str
    tags: dict[str, str]
    metrics: dict[str, float]

    @property
    def run(self) -> str:
        return self.tags["rondo.run"]

    @property
    def round(self) -> str:
        return self.tags.get("round", "-")

    @property
    def experiment(self) -> Experiment:
        """Evaluation and lineage: policies are comparable if these are the same."""
        return self.tags.get("evaluation_id", ""), self.tags.get("lineage", "")

    @property
    def selected(self) -> bool:
        """Whether PPO selected it; `rondo compare` has responses of selected policies only."""
        return self.name == f"{self.round}-ppo"

    @property
    def kl_per_token(self) -> float:
        """KL from SFT in nats."""
        return self.metrics["kl_per_token"]

    @property
    def interval_width(self) -> float:
        high = self.metrics.get("win_rate_high", math.inf)
        return high - self.metrics.get("win_rate_low", -math.inf)

    @property
    def win_rate(self) -> str:
        """With its interval, if that is known."""
        low, high = (self.metrics.get(f"win_rate_{end}") for end in ("low", "high"))
        return interval(self.metrics["win_rate"], low, high)

    def __str__(self) -> str:
        return f"{self.run}:{self.round}"


def read(model: LoggedModel) -> Policy:
    return Policy(
        name=str(model.name),
        recorded=int(model.creation_timestamp),
        path=str((model.params or {})["path"]),
        tags=dict(model.tags or {}),
        metrics={metric.key: float(metric.value) for metric in model.metrics or []},
    )


def policies_within_kl(
    experiment: str, kl: float, here: Collection[Experiment]
) -> list[list[Policy]]:
    """Policies with a KL from SFT below `kl` (nats per token), best first.

    Args:
        experiment: id of MLflow's experiment.
        kl: the budget.
        here: evaluations and lineages of this folder.

    Returns:
        A list for each evaluation and lineage, because only numbers of the same evaluation
        (stages/evaluate/comparability.py) of policies with the same base model and data are
        comparable. Those of this folder are first, then the newest.

    Raises:
        BadInput: there is no such policy; the message names the one nearest to SFT.
    """
    models = mlflow.search_logged_models([experiment], "tags.stage = 'ppo'", output_format="list")
    policies = [read(model) for model in models]
    measured = [policy for policy in policies if {"win_rate", "kl"} <= policy.metrics.keys()]
    if not measured:
        raise BadInput("MLflow has no policy that was evaluated: `rondo run` records them")
    near = [policy for policy in measured if policy.kl_per_token < kl]
    if not near:
        nearest = min(measured, key=lambda policy: policy.kl_per_token)
        raise BadInput(
            f"none of {len(measured)} policies is under {kl:g} nats of KL per token; "
            f"nearest to SFT is {nearest.path} of {nearest}: "
            f"`rondo best --kl {math.ceil(nearest.kl_per_token * 10 + 1e-9) / 10:g}` shows it"
        )
    groups: dict[Experiment, list[Policy]] = {}
    for policy in unique(near):
        groups.setdefault(policy.experiment, []).append(policy)
    sorted_groups = sorted(
        groups.items(),
        key=lambda item: (item[0] in here, max(policy.recorded for policy in item[1])),
        reverse=True,
    )
    return [
        sorted(group, key=lambda policy: -policy.metrics["win_rate"]) for _, group in sorted_groups
    ]


def experiments_here() -> set[Experiment]:
    """Evaluation and lineage of each round in this folder that was evaluated."""
    experiments = set()
    for name in load_params().rounds:
        if (stage_dir(name, "evaluate") / "metrics.json").exists():
            evaluation = read_metrics(name, "evaluate").get("evaluation_id")
            experiments.add((evaluation or "", lineage(name, evaluation)))
    return experiments


def unique(policies: list[Policy]) -> list[Policy]:
    """Each policy once, if several runs recorded it: the record with the narrowest interval, and of
    those the last.
    """
    records: dict[tuple[str, ...], Policy] = {}
    for policy in sorted(policies, key=lambda policy: (policy.interval_width, -policy.recorded)):
        # The path too: all checkpoints of a run share one md5 of DVC
        weights = (policy.tags["md5"] or policy.run, policy.path)
        records.setdefault((*policy.experiment, *weights), policy)
    return list(records.values())


def values(
    home: Path, evaluations: list[list[Policy]], here: Collection[Experiment]
) -> list[dict[str, Any]]:
    """For programs: one object per table of `text`, with its policies, best first."""
    return [
        {
            "evaluation_id": policies[0].experiment[0],
            "lineage": policies[0].experiment[1],
            "of_this_folder": policies[0].experiment in here,
            "policies": [
                {
                    **{"run": policy.run, "round": policy.round, "path": policy.path},
                    **{"selected": policy.selected, "seed": policy.tags.get("seed")},
                    **{"revision": policy.tags.get("revision"), "metrics": policy.metrics},
                    "weights": weights_location(home, policy),
                }
                for policy in policies
            ],
        }
        for policies in evaluations
    ]


def text(home: Path, evaluations: list[list[Policy]], here: Collection[Experiment]) -> str:
    """A table for each list of `policies_within_kl`, each with its best policy and the next step.

    Args:
        home: the .rondo folder.
        here: evaluations and lineages of this folder.
    """
    lines = []
    for policies in evaluations:
        if len(evaluations) > 1 or policies[0].experiment not in here:
            lines.append(title(policies, policies[0].experiment in here))
        shown = fitted_text(table(policies), terminal_width(), keep=KEPT_COLUMNS)
        lines += [shown, advice(home, policies), ""]
    return "\n".join(lines[:-1])


def title(policies: list[Policy], here: bool) -> str:
    """The headline of a table: which evaluation and lineage, and by which presets."""
    evaluation, origins = policies[0].experiment
    presets = sorted({policy.tags["preset"] for policy in policies if "preset" in policy.tags})
    origin = "this folder's" if here else "other settings or data than this folder's"
    return (
        f"Evaluation {evaluation or 'unknown'}, lineage {origins or 'unknown'}: {origin} "
        f"(presets: {', '.join(presets) or 'unknown'}); not comparable with other tables"
    )


def table(policies: list[Policy]) -> Table:
    rich_table = Table(*COLUMNS, box=SIMPLE_HEAD)
    for policy in policies:
        rich_table.add_row(
            policy.run,
            policy.round,
            policy.path.removeprefix(f"{stage_dir(policy.round, 'ppo')}/"),
            policy.win_rate,
            f"{policy.kl_per_token:z.2f}",
            f"{policy.metrics['judge_score']:.3f}" if "judge_score" in policy.metrics else "-",
            policy.tags.get("seed", "-"),
            short_hash(policy.tags.get("revision", "-")),
        )
    return rich_table


def advice(home: Path, policies: list[Policy]) -> str:
    """Names the best policy, the location of its weights, and a policy to compare it with."""
    best = policies[0]
    line = f"Best: {best.path} of {best}, win rate {best.win_rate}"
    if not shown_to_win(best, len(policies)):
        highest = f" (the highest of {len(policies)} win rates)" if len(policies) > 1 else ""
        line += f", not shown to be better than SFT{highest}"
    line += f"; {weights_location(home, best)}"
    selected = [policy for policy in policies if policy.selected][:2]
    if len(selected) < 2:
        return line
    first, second = selected
    return (
        f"{line}. To compare the two best selected policies on the same prompts: "
        f"`rondo compare {second} {first}`"
    )


def shown_to_win(best: Policy, policies: int) -> bool:
    """Whether the win rate of the best of so many policies is above TIE, beyond chance.

    The highest of many win rates is high by chance too, so the lower half of its 95% interval is
    widened as Bonferroni's correction would a normal one. Without an interval, the win rate alone.
    """
    win_rate = best.metrics["win_rate"]
    half = win_rate - best.metrics.get("win_rate_low", win_rate)
    normal = NormalDist()
    widened = half * normal.inv_cdf(1 - 0.025 / policies) / normal.inv_cdf(1 - 0.025)
    return win_rate - widened > TIE


def weights_location(home: Path, policy: Policy) -> str:
    """The location of a policy's weights: the run's workspace, this folder, or DVC's cache."""
    in_workspace, md5 = home / WORKSPACES / policy.run / policy.path, policy.tags["md5"]
    if in_workspace.exists():
        return f"its weights are in {in_workspace}"
    if md5 and Path(policy.path).exists() and digest_of(policy.path, digests(policy.round)) == md5:
        return f"its weights are in {policy.path}"
    branch = f"runs/{policy.run}"
    command = ["git", "rev-parse", "--verify", "--quiet", branch]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return f"its weights are in DVC: `git checkout {branch}`, then `dvc checkout`"
    if md5:
        return (
            f"its weights are in DVC: `git log -S {md5} -- dvc.lock rounds` prints the commit to "
            "check out, if there is one"
        )
    return "its weights are not in DVC"
