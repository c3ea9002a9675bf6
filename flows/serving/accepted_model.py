"""The reward model to serve: that of a round which passes its reward gate with these very files."""

from dataclasses import dataclass
from pathlib import Path

from flows.core.locks import read_lock
from flows.execution.dvc_stages import open_repo
from stages.gate.verdict import evaluate_gate, format_check, passed_or_approved
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import file_hash, is_placeholder, read_json, stage_dir
from stages.lib.core.params import Params

NOT_JUDGED = "not judged"
JUDGED = ("reward", "battery")  # stages whose metrics the gate reads


@dataclass(frozen=True)
class ServedModel:
    """What `/health` states of the model.

    name: `reward@r0`. sha256: of its files. started_from: the model that its training started from.
    template_hash: of how prompts are rendered and tokenised. gate: `passed`, `approved by NAME`,
    `failed` or NOT_JUDGED. failed: the checks that failed, with their numbers.
    """

    name: str
    folder: str
    sha256: str
    started_from: str | None
    template_hash: str | None
    gate: str
    failed: list[str]


def find_model(params: Params, round_: str, allow_failed: bool = False) -> ServedModel:
    """The reward model of a round.

    Args:
        params: the gate's thresholds.
        round_: the round, e.g. `r0`.
        allow_failed: also a model that fails its gate, or that the metrics are not of.

    Raises:
        BadInput: there is no model, or the battery has not tested these files.
        GateFailed: the model fails its gate, and nobody has approved it.
    """
    folder, command = stage_dir(round_, "reward"), f"dvc repro gate_reward@{round_}"
    allow = "to serve it all the same, add --allow-failed"
    manifest = read_json(folder / "manifest.json", command)
    if is_placeholder(folder / "model"):
        raise BadInput(
            f"{folder / 'model'}: {round_} has no reward model, since its data have no preference "
            "pairs: add pairs (docs/data.md) and run it again"
        )
    gate, failed = NOT_JUDGED, []
    if changed := changed_since_battery(round_):
        if not allow_failed:
            raise BadInput(
                f"{changed[0]} is not the version that DVC has recorded: run `{command}`; {allow}"
            )
    else:
        verdict = evaluate_gate(params, "reward", round_)
        failed = [format_check(check) for check in verdict["checks"] if not check["passed"]]
        gate = "failed" if failed else "passed"
        if failed and passed_or_approved(verdict):
            gate = f"approved by {verdict['approval']['by']}"
    if gate == "failed" and not allow_failed:
        raise GateFailed(f"reward@{round_} does not pass its gate: {'; '.join(failed)}; {allow}")
    return ServedModel(
        f"reward@{round_}",
        str(folder / "model"),
        file_hash(folder / "model"),
        manifest.get("started_from"),
        manifest.get("template_hash"),
        gate,
        failed,
    )


def changed_since_battery(round_: str) -> list[str]:
    """Outputs of reward model and battery that are not those that DVC has recorded, or the folder
    of a stage without a record.

    Code and settings may change: they change no model that exists.
    """
    addresses = [f"{stage}@{round_}" for stage in JUDGED]
    folders = [str(stage_dir(round_, stage)) for stage in JUDGED]
    entries = list(map(read_lock, addresses))
    if not all(entries):
        return [folder for folder, entry in zip(folders, entries, strict=True) if not entry]
    with open_repo() as repo:
        status = repo.status(targets=addresses)
    # {address: [{"changed outs": {path: "modified"}}, "changed command"]}
    changes = [change for stage in status.values() for change in stage if isinstance(change, dict)]
    changed = {path for change in changes for paths in change.values() for path in paths}
    return sorted(path for path in changed if any(map(Path(path).is_relative_to, folders)))
