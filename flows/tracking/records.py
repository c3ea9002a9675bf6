"""What MLflow gets of a stage of a run, read from the stage's files: files first, tracker second.

A `Record` is the content of one MLflow run. The flow keeps it in `.rondo/recorded/<run>`
(flows/tracking/mlflow_tracker.py), since a later run may write other results to the folders of the
stage. The files of models are only named: DVC's cache has them. This module does not import MLflow.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from flows.core.addresses import split_address
from flows.core.locks import digest_of, digests, read_lock
from flows.core.verdicts import read_gate
from flows.execution.dvc_stages import open_repo, up_to_date
from stages.gate.approvals import read_rollback
from stages.gate.verdict import passed_or_approved
from stages.lib.core.champion import read_champion
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import (
    REPORTS,
    file_hash,
    is_placeholder,
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
from stages.lib.core.types import Row

# NaN and infinity are metrics too; pydantic would write them as null, which is no number.
ALL_NUMBERS = ConfigDict(ser_json_inf_nan="constants")
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
SCORED = 8  # responses in the example of a reward model
# What the code of the models reads of params.yaml (flows/tracking/pyfunc_model.py)
SECTIONS: dict[str, Any] = {
    "seed": True,
    "model": True,
    "prepare": {"prompt_format"},
    "ppo": {"response_length", "temperature"},
    "reward": {"max_length"},
}
NOTE = "mlflow.note.content"  # the tag with the description of a run
Status = Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
UNFINISHED: dict[str, Status] = {"failed": "FAILED", "cancelled": "KILLED"}  # by outcome


class Step(NamedTuple):
    """One value of one metric at one step."""

    key: str
    value: float
    time: int  # milliseconds since the epoch
    step: int


class ModelFile(NamedTuple):
    """A file of a model that MLflow stores."""

    name: str  # in the model's folder
    md5: str
    path: str  # of DVC's cache; of the model's folder, if DVC does not track it

    def find(self) -> Path:
        """The path of the file.

        Raises:
            BadInput: it is gone, or another one.
        """
        path = Path(self.path)
        if not path.is_file() or md5_of(path) != self.md5:
            raise BadInput(f"{path}, its {self.name}, is gone or changed: run its stage again")
        return path


class Checkpoint(BaseModel):
    """A model: base, SFT or reward model, policy or a checkpoint of it."""

    model_config = ALL_NUMBERS

    name: str
    stage: str  # base, sft, reward or ppo
    path: str  # of its weights
    digest: str  # their md5
    step: int = 0  # PPO updates
    metrics: dict[str, float] = {}
    made_by: str = ""  # the address of the stage whose run lists it; empty: that of the record
    files: list[ModelFile] = []  # that MLflow stores
    no_files: str = ""  # why there are none, if they are wanted


class Record(BaseModel):
    """One stage of a pipeline run, or, with the empty address, the pipeline run itself."""

    model_config = ALL_NUMBERS

    run: str
    address: str = ""
    name: str = ""  # of the pipeline run in MLflow's pages
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
    # What checkpoints with files need besides: the sections of params.yaml that their code reads,
    # rows of their input, and the md5 of the SFT model that adapters adapt
    settings: dict[str, Any] = {}
    examples: list[Row] = []
    sft_digest: str = ""
    # Tags of the policy at its promotion gate: the gate's numbers, and where the policy comes from
    promotion: dict[str, str] = {}


def milliseconds() -> int:
    """The current time in milliseconds since the epoch, as MLflow counts it."""
    return int(time.time() * 1000)


def md5_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among nested metrics, by flat name."""
    return {key: float(value) for key, value in flatten(values) if isinstance(value, int | float)}


def read_steps(address: str, start: int = 0) -> list[Step]:
    """The metrics of a stage by step, from metrics.jsonl, with the times in its clock.jsonl.

    If there is no clock for these steps, since the stage ran on another machine or in another
    workspace, they get the current time.

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
    clock = read_rows(ClockRow, clock_path, command, growing=True) if clock_path.exists() else []
    times = {row["step"]: int(row["time"] * 1000) for row in clock}
    late = [row for row in rows if row["step"] not in times]
    if clock and late == rows[-1:]:  # the stage has not written its time yet
        rows = rows[:-1]
    elif late:
        times = dict.fromkeys((row["step"] for row in rows), milliseconds())
    return [
        Step(key, value, times[row["step"]], row["step"])
        for row in rows[start:]
        for key, value in numbers(row).items()
        if key != "step"
    ]


def health(address: str, steps: Iterable[Step]) -> list[Step]:
    """The steps that the pipeline run shows too: PPO's HEALTH with the round in the key, `r0/kl`.

    Empty for other stages than PPO.
    """
    stage, round_ = split_address(address)
    return [
        step._replace(key=f"{round_}/{step.key}")
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
            models = evaluated_models(round_, metrics)
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
        **needs_of(stage, round_, models),
        promotion=_promotion(round_, tags, failed) if stage == "gate_promote" else {},
    )


def _texts(folder: Path, stage: str, round_: str) -> Iterator[tuple[str, str]]:
    """Name and content of the small files that MLflow keeps as artifacts."""
    reports = ("data.json", "data.html") if stage == "prepare" else (f"{stage}.json",)
    paths = [*folder.glob("*.json"), *folder.glob("*.csv")]
    for path in sorted(paths) + [REPORTS / round_ / name for name in reports]:
        if path.exists() and path.stat().st_size <= MAX_ARTIFACT_BYTES:
            yield path.name, path.read_text(encoding="utf-8")


def _decision(stage: str, round_: str) -> dict[str, str]:
    """Tags of a gate: whether it passed, whether the run continues, who approved it and why."""
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    if verdict is None:
        return {}
    approval = (verdict["approval"] or {}).items()
    return {
        "passed": str(verdict["passed"]),
        "may_continue": str(verdict["may_continue"]),
        "policy": verdict["policy"],
        **{f"approval.{key}": str(value) for key, value in approval if key != "failed"},
    }


def _promotion(round_: str, tags: Mapping[str, str], failed: bool) -> dict[str, str]:
    """Tags of the policy at its promotion gate; empty if the gate has no verdict."""
    verdict, known = read_gate(round_, "promote"), digests(round_)
    policy = str(stage_dir(round_, "ppo") / "policy")
    # A stage that failed although its verdict is good: the verdict is an earlier run's.
    if not verdict or policy not in known or (failed and verdict["may_continue"]):
        return {}
    evaluation = read_metrics(round_, "evaluate")
    metrics = {
        f"evaluate.{key}": value for key, value in evaluation.items() if key.startswith("win_rate")
    }
    metrics |= {check["metric"]: check["value"] for check in verdict["checks"]}
    return {
        **{key: tags[key] for key in ("revision", "seed", "project", "isolated") if key in tags},
        "round": round_,
        "path": policy,
        "md5": known[policy],
        "md5.sft": known.get(str(stage_dir(round_, "sft") / "model"), ""),
        "md5.champion": _policy_digest(_champion_before(round_)),
        "lineage": lineage(round_, evaluation.get("evaluation_id")),
        # not if the run continued by `policy: warn`
        "passed_or_approved": str(passed_or_approved(verdict)),
        **_decision("gate_promote", round_),
        **{key: json.dumps(value) for key, value in metrics.items()},
    }


def champion_digest() -> str:
    """The md5 of the champion of this folder's rounds: after the last one with a promotion gate,
    by its gate or the choice of a person (stages/gate/champion.py). Empty if there is none.
    """
    if not any(REPORTS.glob("*/gate_promote.json")):
        return ""
    for round_ in reversed(load_params().rounds):
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
    return digests(round_).get(str(stage_dir(round_, "ppo") / "policy"), "") if round_ else ""


def lineage(round_: str, evaluation_id: str | None) -> str:
    """12 hex digits over base model, data and evaluation: equal for rounds of one experiment."""
    locks = [read_lock("assets").get("outs", []), read_lock(f"prepare@{round_}").get("deps", [])]
    origins = {
        file["path"]: file["md5"] for files in locks for file in files if file["path"] in ORIGINS
    }
    return json_hash([origins, evaluation_id])[:12]


def trained_models(
    address: str, metrics: Mapping[str, Any], upload: Collection[Upload]
) -> list[Checkpoint]:
    """The models that a stage made.

    Args:
        address: the stage in DVC, e.g. `ppo@r0`.
        metrics: its metrics.json.
        upload: the kinds of models whose files MLflow stores.
    """
    stage, round_ = split_address(address)
    known = digests(round_)
    if stage == "ppo":
        folders = sorted((stage_dir(round_, "ppo") / "checkpoints").glob("step_*"))
        kinds = {"ppo": {Upload.policy}}
        kinds |= {folder.name: {Upload.checkpoints} for folder in folders}
    elif stage == "reward":
        if is_placeholder(stage_dir(round_, "reward") / "model"):
            return []
        kinds = {"reward": {Upload.reward}}
    elif stage == "sft":
        # policies are adapters of it
        adapters = {Upload.policy, Upload.checkpoints} if params_of(round_).ppo.lora.r else set()
        kinds = {"sft": {Upload.sft} | adapters}
    else:
        return []
    models = [_model(round_, name, known) for name in kinds]
    for model, wanted in zip(models, kinds.values(), strict=True):
        if stage == "reward":
            model.metrics = numbers(metrics)
        if wanted & set(upload):
            add_files(model, address)
    return models


def evaluated_models(round_: str, metrics: Mapping[str, Any]) -> list[Checkpoint]:
    """The models in evaluate's metrics.json, with their metrics."""
    known = digests(round_)
    values = {name: metrics[name] for name in ("base", "sft", "ppo") if name in metrics}
    if "ppo" in values:
        # The metrics at the top level compare the policy with SFT.
        against_sft = {key: one for key, one in metrics.items() if isinstance(one, int | float)}
        values["ppo"] = {**values["ppo"], **against_sft}
    values |= metrics.get("checkpoints", {})
    return [_model(round_, name, known, numbers(of_model)) for name, of_model in values.items()]


def _model(
    round_: str, name: str, known: Mapping[str, str], metrics: Mapping[str, float] = {}
) -> Checkpoint:
    """A model of a round: base, sft, reward, ppo (the selected policy) or a checkpoint."""
    stage = name if name in ("base", "sft", "reward") else "ppo"
    folder, step = stage_dir(round_, stage), update_of(name)
    paths = {"base": Path("assets/model"), "ppo": folder / "policy"}
    paths |= {"sft": folder / "model", "reward": folder / "model"}
    path = paths.get(name, folder / "checkpoints" / name)
    if name == "ppo" and (folder / "metrics.json").exists():
        step = read_metrics(round_, "ppo").get("policy_update", 0)
    return Checkpoint(
        name=f"{round_}-{name}",
        stage=stage,
        path=str(path),
        digest=digest_of(str(path), known),
        step=step,
        metrics=dict(metrics),
        made_by="assets" if stage == "base" else f"{stage}@{round_}",
    )


def update_of(name: str) -> int:
    """The PPO update in a checkpoint's name, `step_00009` -> 9; 0 for other names."""
    number = name.removeprefix("step_")
    return int(number) if number.isdecimal() else 0


def add_files(model: Checkpoint, address: str = "") -> None:
    """Name the files of a model, or the reason why they cannot be read.

    Args:
        address: the stage whose output has the files; empty: DVC does not track them.
    """
    path = Path(model.path)
    try:
        model.files = _tracked_files(path, address) if address else _files_now(path)
    except BadInput as error:
        model.no_files = str(error)


def _tracked_files(path: Path, address: str) -> list[ModelFile]:
    """The files of an output of a stage, or of a folder in one, as dvc.lock has them.

    Raises:
        BadInput: the folder is no output of the stage, or DVC's cache lacks the list of its files.
    """
    outs = {Path(out["path"]): out["md5"] for out in read_lock(address).get("outs", [])}
    out = next((parent for parent in (path, *path.parents) if parent in outs), None)
    if out is None:
        raise BadInput(f"{path} is not in dvc.lock: run `dvc repro {address}`")
    with open_repo() as repo:
        cached = repo.cache.local.oid_to_path
    listing = Path(cached(outs[out]))
    if not listing.exists():
        raise BadInput(f"{listing} is missing: `dvc gc` removed {out} from DVC's cache")
    md5s = {out / entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_bytes())}
    return [
        ModelFile(str(file.relative_to(path)), md5, str(Path(cached(md5)).resolve()))
        for file, md5 in sorted(md5s.items())
        if path in file.parents
    ]


def _files_now(path: Path) -> list[ModelFile]:
    """The files of a folder that DVC does not track, with the md5s that they have now."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [
        ModelFile(str(file.relative_to(path)), md5_of(file), str(file.resolve())) for file in files
    ]


def needs_of(stage: str, round_: str, models: Iterable[Checkpoint]) -> dict[str, Any]:
    """The fields of a record that models with files need besides; empty if there is no such model.

    Raises:
        BadInput: the round's data is missing.
    """
    if not any(model.files for model in models):
        return {}
    data = stage_dir(round_, "prepare") / "data"
    if stage == "reward":
        pairs = read_jsonl(data / "pairs_eval.jsonl")[:SCORED]
        examples = [{"prompt": row["prompt"], "response": row["chosen"]} for row in pairs]
    else:
        # All prompts of the evaluation: in other batches, products may round otherwise.
        rows = read_jsonl(data / "eval_prompts.jsonl")
        examples = [{"prompt": row["prompt"]} for row in rows]
    return {
        "settings": params_of(round_).model_dump(mode="json", include=SECTIONS),
        "examples": examples,
        "sft_digest": digests(round_).get(str(stage_dir(round_, "sft") / "model"), ""),
    }


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
        add_files(checkpoint, f"ppo@{round_}" if in_dvc else "")
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
        **needs_of("ppo", round_, [checkpoint]),
    )
