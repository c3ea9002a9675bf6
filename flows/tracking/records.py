"""What MLflow gets of a stage of a run, read from the stage's files: files first, tracker second.

A `Record` is the content of one MLflow run. The flow keeps it in `.rondo/recorded/<run>`
(flows/tracking/sync.py), since a later run may write other results to the folders of the stage.
This module does not import MLflow.
"""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.core.locks import digest_of, digests, read_lock
from flows.core.verdicts import read_gate
from flows.execution.dvc_stages import up_to_date
from flows.tracking.models import (
    ALL_NUMBERS,
    Checkpoint,
    ModelCode,
    code_of,
    evaluated_models,
    numbers,
    trained_models,
    update_of,
    with_files,
)
from stages.gate.approvals import read_rollback
from stages.gate.verdict import passed_or_approved
from stages.lib.core.champion import read_champion
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.files import (
    REPORTS,
    file_hash,
    json_hash,
    metric_name,
    read_json,
    read_jsonl,
    stage_dir,
    work_dir,
)
from stages.lib.core.params import flatten, load_params
from stages.lib.core.params.tracking import Upload
from stages.lib.core.recorder import read_metrics
from stages.lib.core.rows import ClockRow, StepRow, read_rows

MAX_ARTIFACT_BYTES = 1_000_000
HEALTH = (  # metrics of PPO per update that the pipeline run shows too
    "score_mean",
    "judge_score_mean",
    "kl",
    "kl_per_token",
    "response_length",
    "distinct_2",
    "repetition_3",
    "entropy",
)
ORIGINS = ("assets/model", "assets/data", "assets/inputs/data.json")  # not made by any round
Status = Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
UNFINISHED: dict[str, Status] = {"failed": "FAILED", "cancelled": "KILLED"}  # by outcome


class Step(BaseModel):
    """One value of one metric at one step; `time`: milliseconds since the epoch."""

    model_config = ALL_NUMBERS

    key: str
    value: float
    time: int
    step: int


class Promotion(BaseModel):
    """A policy that reached its promotion gate."""

    digest: str  # its md5 in dvc.lock
    passed_or_approved: bool  # by a gate or a person; not if the run continued by `policy: warn`
    evidence: dict[str, str]  # the gate's numbers, and where the policy comes from


class Record(BaseModel):
    """One stage of a pipeline run, or, with the empty address, the pipeline run itself."""

    model_config = ALL_NUMBERS

    run: str
    address: str = ""
    status: Status = "RUNNING"  # MLflow's; a run that waits for a decision is SCHEDULED
    started: int  # milliseconds since the epoch
    ended: int  # the same as `started` for a stage that did not compute
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    steps: list[Step] = []
    final: dict[str, float] = {}  # the metrics at the end, by name
    inputs: dict[str, str] = {}  # data sets: path -> md5 in dvc.lock
    samples: list[dict[str, Any]] = []
    texts: dict[str, str] = {}  # artifacts by file name
    checkpoints: list[Checkpoint] = []
    code: ModelCode | None = None  # of the checkpoints with files
    promotion: Promotion | None = None


def milliseconds() -> int:
    """The current time in milliseconds since the epoch, as MLflow counts it."""
    return int(time.time() * 1000)


def read_steps(address: str, start: int = 0) -> list[Step]:
    """The metrics of a stage by step, from metrics.jsonl, with the times in its clock.jsonl.

    If there is no clock for these steps, they get the current time.

    Args:
        start: how many lines of metrics.jsonl to skip.
    """
    stage, round_ = split_address(address)
    path = stage_dir(round_, stage) / "metrics.jsonl"
    clock_path = work_dir(round_, stage) / "clock.jsonl"
    if not path.exists():
        return []
    command = f"dvc repro -f {address}"
    rows = read_rows(StepRow, path, command, growing=True)
    clock = (
        read_rows(ClockRow, clock_path, command, growing=True)[1:] if clock_path.exists() else []
    )
    # the stage has written a step to one of the files only
    if clock_path.exists() and abs(len(rows) - len(clock)) == 1:
        rows, clock = rows[: len(clock)], clock[: len(rows)]
    if [row["step"] for row in clock] == [row["step"] for row in rows]:
        times = [int(row["time"] * 1000) for row in clock]
    else:  # the stage ran on another machine, or in another workspace
        times = [milliseconds()] * len(rows)
    return [
        Step(key=key, value=value, time=step_time, step=row["step"])
        for row, step_time in list(zip(rows, times, strict=True))[start:]
        for key, value in numbers(row).items()
        if key != "step"
    ]


def health(address: str, steps: Iterable[Step]) -> list[Step]:
    """The steps that the pipeline run shows too: PPO's HEALTH with the round in the key, `r0/kl`.

    Empty for other stages than PPO.
    """
    stage, round_ = split_address(address)
    return [
        step.model_copy(update={"key": f"{round_}/{step.key}"})
        for step in steps
        if stage == "ppo" and step.key in HEALTH
    ]


def read_record(
    run: str,
    address: str,
    outcome: str,
    tags: Mapping[str, str],
    upload: Collection[Upload] = (),
) -> Record:
    """The record of a stage, from its files.

    Args:
        run: the name of the pipeline run.
        address: the stage in DVC, e.g. `sft@r0`.
        outcome: `ran`, `restored`, `unchanged`, `failed` or `cancelled`. After the last two, files
            may belong to an earlier run, so only steps and texts are read.
        tags: of the pipeline run; they become tags of the stage.
        upload: the kinds of models whose files MLflow stores.
    """
    stage, round_ = split_address(address)
    folder, failed = stage_dir(round_, stage), outcome in UNFINISHED
    lock: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    models: list[Checkpoint] = []
    tags = {**tags, "stage": stage, "round": round_, "dvc": outcome}
    if not failed:
        lock = read_lock(address)
        if (folder / "metrics.json").exists():
            metrics = read_metrics(round_, stage)
        if (folder / "samples.jsonl").exists():
            samples = read_jsonl(folder / "samples.jsonl")
        models = trained_models(address, metrics, upload)
        if stage == "evaluate":
            models += evaluated_models(round_, metrics)
            tags["lineage"] = lineage(round_, metrics.get("evaluation_id"))
    now = milliseconds()
    params = dict(flatten(lock.get("params", {}).get("params.yaml", {}), separator="."))
    return Record(
        run=run,
        address=address,
        status=UNFINISHED.get(outcome, "FINISHED"),
        started=now,
        ended=now,
        params={key: str(value) for key, value in params.items()},
        tags={
            **tags,
            "params_hash": json_hash(params)[:12],
            **{key: value for key, value in flatten(metrics) if isinstance(value, str)},
            **_decision(stage, round_),
            **{f"md5 {out['path']}": out["md5"] for out in lock.get("outs", [])},
        },
        steps=read_steps(address),
        # a checkpoint is a model with metrics of its own; the run's are columns of MLflow's page
        final=numbers({key: value for key, value in metrics.items() if key != "checkpoints"}),
        inputs={
            dep["path"]: dep["md5"] for dep in lock.get("deps", []) if dep["path"].endswith("/data")
        },
        samples=samples,
        texts=dict(_texts(folder, stage, round_)),
        checkpoints=models,
        code=code_of(stage, round_, models),
        promotion=_promotion(round_, tags, failed) if stage == "gate_promote" else None,
    )


def _texts(folder: Path, stage: str, round_: str) -> Iterator[tuple[str, str]]:
    """Name and content of the small files that MLflow keeps as artifacts."""
    reports = ("data.json", "data.html") if stage == "prepare" else (f"{stage}.json",)
    paths = [*folder.glob("*.json"), *folder.glob("*.csv")]
    for path in sorted(paths) + [REPORTS / round_ / name for name in reports]:
        if path.exists() and path.stat().st_size <= MAX_ARTIFACT_BYTES:
            yield path.name, path.read_text(encoding="utf-8")


def _decision(stage: str, round_: str) -> dict[str, str]:
    """Tags of a gate: whether it passed, whether the run continues, who approved it and why.

    Empty for a stage that is no gate, or a gate without a verdict.
    """
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    if verdict is None:
        return {}
    approval = {
        f"approval.{key}": str(value)
        for key, value in (verdict["approval"] or {}).items()
        if key != "failed"
    }
    return {
        "passed": str(verdict["passed"]),
        "may_continue": str(verdict["may_continue"]),
        "policy": verdict["policy"],
        **approval,
    }


def _promotion(round_: str, tags: Mapping[str, str], failed: bool) -> Promotion | None:
    """The policy at its promotion gate; None if the gate has no verdict."""
    verdict, known = read_gate(round_, "promote"), digests(round_)
    policy = str(stage_dir(round_, "ppo") / "policy")
    # A stage that failed although its verdict is good: the verdict is an earlier run's.
    if not verdict or policy not in known or (failed and verdict["may_continue"]):
        return None
    evaluation = read_metrics(round_, "evaluate")
    metrics = {
        f"evaluate.{key}": value for key, value in evaluation.items() if key.startswith("win_rate")
    }
    metrics |= {check["metric"]: check["value"] for check in verdict["checks"]}
    evidence = {
        **{key: tags[key] for key in ("revision", "seed", "project", "isolated") if key in tags},
        "round": round_,
        "path": policy,
        "md5": known[policy],
        "md5.sft": known.get(str(stage_dir(round_, "sft") / "model"), ""),
        "md5.champion": _policy_digest(_champion_before(round_)),
        "lineage": lineage(round_, evaluation.get("evaluation_id")),
        **_decision("gate_promote", round_),
        **{key: json.dumps(value) for key, value in metrics.items()},
    }
    passed = passed_or_approved(verdict)
    return Promotion(digest=known[policy], passed_or_approved=passed, evidence=evidence)


def champion_digest() -> str:
    """The md5 of the champion of this folder's rounds: after the last one with a promotion gate,
    by its gate or the choice of a person (stages/gate/champion.py). Empty if there is none.
    """
    rounds = (
        reversed(list(load_params().rounds)) if any(REPORTS.glob("*/gate_promote.json")) else ()
    )
    for round_ in rounds:
        policy, verdict = stage_dir(round_, "ppo") / "policy", read_gate(round_, "promote")
        if policy.exists() and verdict:
            choice = read_rollback(round_)
            if choice and choice.champion and choice.policy == file_hash(policy):
                return _policy_digest(choice.champion.round)
            passed = passed_or_approved(verdict)
            return _policy_digest(round_ if passed else _champion_before(round_))
    return ""


def _champion_before(round_: str) -> str | None:
    """The round of the champion with which this round's policy was compared; None if none."""
    path = stage_dir(round_, "champion") / "champion.json"
    return read_champion(path).round if path.exists() else None


def _policy_digest(round_: str | None) -> str:
    policy = str(stage_dir(round_, "ppo") / "policy") if round_ else ""
    return digests(round_).get(policy, "") if round_ else ""


def lineage(round_: str, evaluation_id: str | None) -> str:
    """12 hex digits over base model, data and evaluation: equal for rounds of one experiment."""
    locks = [read_lock("assets").get("outs", []), read_lock(f"prepare@{round_}").get("deps", [])]
    origins = {
        file["path"]: file["md5"] for files in locks for file in files if file["path"] in ORIGINS
    }
    return json_hash([origins, evaluation_id])[:12]


def read_checkpoint(
    run: str, report: Path, tags: Mapping[str, str], upload: Collection[Upload] = ()
) -> Record:
    """The record of a checkpoint, from the report that stages/evaluate/checkpoint.py wrote.

    Its digest is the md5 in dvc.lock if the files of PPO are up to date, else the report's hash.
    """
    results, now = read_json(report, "the flow evaluate-checkpoint"), milliseconds()
    path, round_ = Path(results["path"]), results["round"]
    name = metric_name(path.name)
    against_sft = {f"win_rate{end}": results[f"win_rate_sft{end}"] for end in ("", "_low", "_high")}
    tracked = has_ended(round_) or up_to_date(f"ppo@{round_}")
    checkpoint = Checkpoint(
        name=f"{round_}-{name}",
        stage="ppo",
        path=str(path),
        digest=digest_of(str(path), digests(round_) if tracked else {}) or results["hash"],
        step=update_of(name),
        metrics=numbers(results["checkpoint"] | against_sft),
    )
    if Upload.checkpoints in upload:
        in_dvc = tracked and stage_dir(round_, "ppo") in path.parents
        checkpoint = with_files(checkpoint, f"ppo@{round_}" if in_dvc else "")
    return Record(
        run=run,
        address=f"{name}-{results['hash'][:8]}-{results['evaluation_id'][:8]}@{round_}",
        status="FINISHED",
        started=now,
        ended=now,
        tags={
            **tags,
            "stage": "checkpoint",
            "round": round_,
            "seed": str(params_of(round_).seed),
            "path": str(path),
            "evaluation_id": results["evaluation_id"],
            "lineage": lineage(round_, results["evaluation_id"]),
        },
        final=numbers(results),
        samples=read_jsonl(report.with_suffix(".jsonl"), "the flow evaluate-checkpoint"),
        texts={report.name: report.read_text(encoding="utf-8")},
        checkpoints=[checkpoint],
        code=code_of("ppo", round_, [checkpoint]),
    )
