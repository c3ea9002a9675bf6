"""`rondo best`: the policies of all recorded runs by judged win rate against SFT, within a KL
budget.
"""

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import LoggedModel
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.tables import drawn, interval, short
from flows.execution.worktree import WORKSPACES
from flows.tracking.records import digest_of, digests
from stages.lib.core.errors import BadInput

COLUMNS = (
    "run",
    "round",
    "policy",
    "win rate against SFT [95%]",
    "KL, nats",
    "judged sentiment",
    "seed",
    "git",
)


@dataclass(frozen=True)
class Policy:
    """A LoggedModel with the tag stage `ppo`: a policy, or a checkpoint on its way. made: when it
    was recorded, in milliseconds.
    """

    name: str
    made: int
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
    def kept(self) -> bool:
        """Whether it is what its run's PPO ended with, so that `rondo compare` knows its answers."""
        return self.name == f"{self.round}-ppo"

    @property
    def width(self) -> float:
        return self.metrics.get("win_rate_high", math.inf) - self.metrics.get(
            "win_rate_low", -math.inf
        )

    def __str__(self) -> str:
        return f"{self.run}:{self.round}"


def read(model: LoggedModel) -> Policy:
    made, metrics = (
        int(model.creation_timestamp),
        {metric.key: float(metric.value) for metric in model.metrics or []},
    )
    return Policy(
        str(model.name), made, str((model.params or {})["path"]), dict(model.tags or {}), metrics
    )


def policies_within_kl(experiment: str, kl: float) -> list[list[Policy]]:
    """Those under that KL, best first; a list for each evaluation
    (stages/evaluate/comparability.py), the newest first.

    Raises:
        BadInput: there are none; says what there is.
    """
    found = [
        read(model)
        for model in mlflow.search_logged_models(
            [experiment], "tags.stage = 'ppo'", output_format="list"
        )
    ]
    measured = [policy for policy in found if {"win_rate", "kl"} <= policy.metrics.keys()]
    if not measured:
        raise BadInput("MLflow has no policy that was evaluated: `rondo run` records them")
    near = [policy for policy in measured if policy.metrics["kl"] < kl]
    if not near:
        least = min(measured, key=lambda policy: policy.metrics["kl"])
        raise BadInput(
            f"none of {len(measured)} policies is under {kl:g} nats of KL; nearest to SFT is {least.path} of {least}: "
            f"`rondo best --kl {math.floor(least.metrics['kl']) + 1}` shows it"
        )
    apart: dict[str, list[Policy]] = {}
    for policy in once(near):
        apart.setdefault(policy.tags.get("evaluation_id", ""), []).append(policy)
    newest = sorted(
        apart.values(), key=lambda together: max(policy.made for policy in together), reverse=True
    )
    return [sorted(together, key=lambda policy: -policy.metrics["win_rate"]) for together in newest]


def once(policies: list[Policy]) -> list[Policy]:
    """Of one that several runs have recorded, where it was measured most narrowly, and of those the
    last.
    """
    chosen: dict[tuple[str, ...], Policy] = {}
    for policy in sorted(policies, key=lambda policy: (policy.width, -policy.made)):
        weights = (
            policy.tags["md5"] or policy.run,
            policy.path,
        )  # a run's checkpoints share DVC's md5
        chosen.setdefault((policy.tags.get("evaluation_id", ""), *weights), policy)
    return list(chosen.values())


def text(home: Path, evaluations: list[list[Policy]]) -> str:
    """A table for each of `within`'s lists, and what to do with the first one's best. home: the
    .rondo folder.
    """
    lines = []
    for together in evaluations:
        if len(evaluations) > 1:
            lines.append(
                f"evaluation {together[0].tags.get('evaluation_id', 'unknown')}, not comparable with the others:"
            )
        lines.append(drawn(table(together)))
    return "\n".join([*lines, advice(home, evaluations[0])])


def table(policies: list[Policy]) -> Table:
    shown = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        shown.add_column(column, overflow="fold")
    for policy in policies:
        shown.add_row(
            policy.run,
            policy.round,
            policy.path,
            told(policy),
            f"{policy.metrics['kl']:.2f}",
            f"{policy.metrics['sentiment']:.3f}" if "sentiment" in policy.metrics else "-",
            policy.tags.get("seed", "-"),
            short(policy.tags.get("revision", "-")),
        )
    return shown


def told(policy: Policy) -> str:
    return interval(
        policy.metrics["win_rate"],
        policy.metrics.get("win_rate_low"),
        policy.metrics.get("win_rate_high"),
    )


def advice(home: Path, policies: list[Policy]) -> str:
    """Which is best, where its weights are, and with what to compare it."""
    best, kept = policies[0], [policy for policy in policies if policy.kept][:2]
    line = f"Best: {best.path} of {best}, win rate {told(best)}; {weights(home, best)}"
    return line + (
        f". The best two that were kept, on the same prompts: `rondo compare {kept[1]} {kept[0]}`"
        if len(kept) > 1
        else ""
    )


def weights(home: Path, policy: Policy) -> str:
    """Where they are: in the folder of the run, in this one, or with DVC."""
    own, md5 = home / WORKSPACES / policy.run / policy.path, policy.tags["md5"]
    if own.exists():
        return f"its weights are in {own}"
    if md5 and Path(policy.path).exists() and digest_of(policy.path, digests(policy.round)) == md5:
        return f"its weights are in {policy.path}"
    branch = f"runs/{policy.run}"
    if not subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", branch], capture_output=True, check=False
    ).returncode:
        return f"its weights are with DVC: `git checkout {branch}`, then `dvc checkout ppo@{policy.round}`"
    if md5:
        return f"its weights are with DVC: `git log -S {md5} -- dvc.lock` names the commit to check out, if there is one"
    return "its weights were not kept by DVC"
