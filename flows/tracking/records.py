"""What MLflow is told about a stage, read from the stage's files: files first, tracker second.

A `Record` is complete in itself, so that one which could not be sent waits in `.rondo/unsent.jsonl`
and is sent later, even when the files have changed by then. `flows/tracking/mlflow_store.py` sends
it; here nothing imports MLflow.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.core.verdicts import read_gate
from flows.execution.dvc_stages import up_to_date
from stages.gate.verdict import passed_or_approved
from stages.lib.core.files import REPORTS, metric_name, read_json, read_jsonl, stage_dir, work_dir
from stages.lib.core.params import flatten

MAX_ARTIFACT_BYTES = 1_000_000
HEALTH = (
    "score_mean",
    "judge_mean",
    "kl",
    "response_length",
    "distinct_2",
    "repetition_3",
    "entropy",
)  # of PPO, by update
ARTIFACTS = (
    "metrics.json",
    "manifest.json",
    "curves.csv",
    "calibration.csv",
    "probes.csv",
    "accuracy.csv",
    "scores.csv",
)


class Step(BaseModel):
    """One value of one metric; `time` in milliseconds since the epoch."""

    key: str
    value: float
    time: int
    step: int


class Data(BaseModel):
    """An input data set: its path, and as digest the md5 that DVC has of it."""

    path: str
    digest: str


class Checkpoint(BaseModel):
    """A model that was evaluated: `step` in PPO updates, `path` where its weights are, `stage` what
    made it: base, sft or ppo.
    """

    name: str
    stage: str
    path: str
    digest: str
    step: int
    metrics: dict[str, float]


class Promotion(BaseModel):
    """A policy that came to its promotion gate: its DVC md5, and what the gate saw. vouched: it
    passed, or a person let it through.
    """

    digest: str
    vouched: bool = True  # of a record that waits since before there were challengers
    evidence: dict[str, str]


class Record(BaseModel):
    """One stage of one pipeline run, or (address ``) the pipeline run itself."""

    run: str
    address: str = ""
    status: Literal["RUNNING", "FINISHED", "FAILED"] = "RUNNING"
    started: int
    ended: int
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    steps: list[Step] = []
    final: dict[str, float] = {}
    inputs: list[Data] = []
    samples: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    checkpoints: list[Checkpoint] = []
    promotion: Promotion | None = None


def milliseconds() -> int:
    return int(time.time() * 1000)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in flatten(values) if isinstance(value, int | float)}


def read_locks() -> dict[str, dict[str, Any]]:
    """The stages in dvc.lock by address: params, deps and outs with their md5."""
    path = Path("dvc.lock")
    return dict(yaml.safe_load(path.read_text())["stages"]) if path.exists() else {}


def read_lock(address: str) -> dict[str, Any]:
    """The stage's entry in dvc.lock, empty when there is none."""
    return read_locks().get(address, {})


def read_steps(address: str, start: int = 0) -> list[Step]:
    """metrics.jsonl from line `start` on, with the wall clock that the stage kept beside it;
    without one, with the time now.
    """
    stage, round_ = split_address(address)
    path, clock_path = (
        stage_dir(round_, stage) / "metrics.jsonl",
        work_dir(round_, stage) / "clock.jsonl",
    )
    if not path.exists():
        return []
    rows = read_jsonl(path, f"dvc repro {address}")
    clock = read_jsonl(clock_path, "")[1:] if clock_path.exists() else []
    if [row["step"] for row in clock] == [row["step"] for row in rows]:
        times = [int(row["time"] * 1000) for row in clock]
    else:  # the stage ran on another machine, or in another workspace
        times = [milliseconds()] * len(rows)
    return [
        Step(key=key, value=value, time=moment, step=row["step"])
        for row, moment in list(zip(rows, times, strict=True))[start:]
        for key, value in numbers(row).items()
        if key != "step"
    ]


def health(address: str, steps: Iterable[Step]) -> list[Step]:
    """What the pipeline run shows of a stage's steps: PPO's health with the round, `r0/kl`; nothing
    of other stages.
    """
    stage, round_ = split_address(address)
    return [
        step.model_copy(update={"key": f"{round_}/{step.key}"})
        for step in steps
        if stage == "ppo" and step.key in HEALTH
    ]


def read_record(run: str, address: str, outcome: str, tags: Mapping[str, str]) -> Record:
    """Everything that the files say about a stage that ran, was restored, was unchanged, or failed."""
    stage, round_ = split_address(address)
    folder, failed = stage_dir(round_, stage), outcome == "failed"
    lock = {} if failed else read_lock(address)
    metrics = (
        {}
        if failed or not (folder / "metrics.json").exists()
        else read_json(folder / "metrics.json", "")
    )
    steps, now = read_steps(address), milliseconds()
    params = dict(flatten(lock.get("params", {}).get("params.yaml", {}), separator="."))
    times = [step.time for step in steps]
    return Record(
        run=run,
        address=address,
        status="FAILED" if failed else "FINISHED",
        started=min(times, default=now),
        ended=max(times, default=now),
        params={key: str(value) for key, value in params.items()},
        tags={
            **tags,
            "stage": stage,
            "round": round_,
            "dvc": outcome,
            "params_hash": hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[
                :12
            ],
            **{key: value for key, value in flatten(metrics) if isinstance(value, str)},
            **_decision(stage, round_),
            **{f"md5 {out['path']}": out["md5"] for out in lock.get("outs", [])},
        },
        steps=steps,
        final=numbers(metrics),
        inputs=[
            Data(path=dep["path"], digest=dep["md5"])
            for dep in lock.get("deps", [])
            if dep["path"].endswith("/data")
        ],
        samples=[]
        if failed or not (folder / "samples.jsonl").exists()
        else read_jsonl(folder / "samples.jsonl", ""),
        texts=dict(_texts(folder, stage, round_)),
        checkpoints=list(_checkpoints(round_, metrics)) if stage == "evaluate" else [],
        promotion=_promotion(round_, tags, failed) if stage == "gate_promote" else None,
    )


def _texts(folder: Path, stage: str, round_: str) -> Iterator[tuple[str, str]]:
    reports = ("data.json", "data.html") if stage == "prepare" else (f"{stage}.json",)
    for path in (
        *(folder / name for name in ARTIFACTS),
        *(REPORTS / round_ / name for name in reports),
    ):
        if path.exists() and path.stat().st_size <= MAX_ARTIFACT_BYTES:
            yield path.name, path.read_text(encoding="utf-8")


def _decision(stage: str, round_: str) -> dict[str, str]:
    """Of a gate: whether it passed and opened, and who decided otherwise, why."""
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    if verdict is None:
        return {}
    said = {
        f"approval.{key}": str(value)
        for key, value in (verdict["approval"] or {}).items()
        if key != "failed"
    }
    return {
        "passed": str(verdict["passed"]),
        "opened": str(verdict["opened"]),
        "policy": verdict["policy"],
        **said,
    }


def _promotion(round_: str, tags: Mapping[str, str], failed: bool) -> Promotion | None:
    """None where the gate did not come to a verdict. Nobody vouches for a policy that `warn` let
    pass.
    """
    verdict, known = read_gate(round_, "promote"), digests(round_)
    policy, sft = (
        str(stage_dir(round_, stage) / name)
        for stage, name in (("ppo", "policy"), ("sft", "model"))
    )
    if (
        not verdict or policy not in known or (failed and verdict["opened"])
    ):  # of a run before this one, which failed
        return None
    measured = read_json(
        stage_dir(round_, "evaluate") / "metrics.json", f"dvc repro evaluate@{round_}"
    )
    told = {
        f"evaluate.{key}": value for key, value in measured.items() if key.startswith("win_rate")
    }
    told |= {check["metric"]: check["value"] for check in verdict["checks"]}
    evidence = {
        **{key: tags[key] for key in ("revision", "seed") if key in tags},
        "round": round_,
        "path": policy,
        "md5": known[policy],
        "md5.sft": known.get(sft, ""),
        **_decision("gate_promote", round_),
        **{key: json.dumps(value) for key, value in told.items()},
    }
    return Promotion(digest=known[policy], vouched=passed_or_approved(verdict), evidence=evidence)


def digests(round_: str) -> dict[str, str]:
    """md5 of the models that a round works with, by path, from dvc.lock."""
    return {
        out["path"]: out["md5"]
        for name in ("assets", f"sft@{round_}", f"ppo@{round_}")
        for out in read_lock(name).get("outs", [])
    }


def digest_of(path: str, known: Mapping[str, str]) -> str:
    """A model's md5, or that of the folder that DVC has it in."""
    return known.get(path) or known.get(str(Path(path).parent), "")


def _checkpoints(round_: str, metrics: Mapping[str, Any]) -> Iterator[Checkpoint]:
    """The models of evaluate's metrics.json, each with the hash of its weights from dvc.lock."""
    known, ppo = digests(round_), stage_dir(round_, "ppo")
    paths = {
        "base": Path("assets/model"),
        "sft": stage_dir(round_, "sft") / "model",
        "ppo": ppo / "policy",
    }
    found = {name: metrics[name] for name in paths if name in metrics}
    for name, values in metrics.get("checkpoints", {}).items():
        paths[name], found[name] = ppo / "checkpoints" / name, values
    last = (
        read_json(ppo / "metrics.json", f"dvc repro ppo@{round_}").get("policy_update", 0)
        if (ppo / "metrics.json").exists()
        else 0
    )
    against_sft = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    for name, values in found.items():
        path = paths[name]
        yield Checkpoint(
            name=f"{round_}-{name}",
            stage=name if name in ("base", "sft") else "ppo",
            path=str(path),
            digest=digest_of(str(path), known),
            step=last if name == "ppo" else update_of(name),
            metrics=numbers({**values, **against_sft} if name == "ppo" else values),
        )


def read_checkpoint(run: str, report: Path, tags: Mapping[str, str]) -> Record:
    """What stages/evaluate/checkpoint.py has told about a checkpoint; its md5 is DVC's where PPO's
    files are those of dvc.lock.
    """
    told, now = read_json(report, "the flow evaluate-checkpoint"), milliseconds()
    path, round_ = Path(told["path"]), told["round"]
    name = metric_name(path.name)
    against_sft = {f"win_rate{end}": told[f"win_rate_sft{end}"] for end in ("", "_low", "_high")}
    checkpoint = Checkpoint(
        name=f"{round_}-{name}",
        stage="ppo",
        path=str(path),
        digest=digest_of(str(path), digests(round_) if up_to_date(f"ppo@{round_}") else {})
        or told["hash"],
        step=update_of(name),
        metrics=numbers(told["checkpoint"] | against_sft),
    )
    return Record(
        run=run,
        address=f"{name}-{told['hash'][:8]}-{told['evaluation_id'][:8]}@{round_}",
        status="FINISHED",
        started=now,
        ended=now,
        tags={
            **tags,
            "stage": "checkpoint",
            "round": round_,
            "path": str(path),
            "evaluation_id": told["evaluation_id"],
        },
        final=numbers(told),
        samples=read_jsonl(report.with_suffix(".jsonl"), "the flow evaluate-checkpoint"),
        texts={report.name: report.read_text(encoding="utf-8")},
        checkpoints=[checkpoint],
    )


def update_of(name: str) -> int:
    """PPO's update that a checkpoint is named after; 0 where it has another name."""
    number = name.removeprefix("step_")
    return int(number) if number.isdecimal() else 0


class NullTracker:
    """Tracking switched off."""

    def start(self, address: str) -> None:
        """A stage begins."""

    def progress(self) -> None:
        """The stage printed a line."""

    def finish(self, outcome: str) -> None:
        """The stage ended: `ran`, `restored`, `unchanged` or `failed`."""

    def page(self, address: str = "", text: str = "") -> str | None:
        """Where a browser finds what was told of a stage, or of the pipeline run, or one of its
        texts; None where it does not.
        """
        return None

    def send(self, record: Record) -> None:
        """Something beside the pipeline's stages."""

    def close(self, passed: bool, texts: Mapping[str, str]) -> None:
        """The pipeline run ended; texts: by file name, what it leaves to be read."""
