"""Ended rounds are history: no changed setting and no edited code runs them again.

A round ends when all of its stages have run and a later round begins. It leaves params.yaml, and so
dvc.yaml's rows of stages, and dvc.lock. Its outputs become data of DVC, for which there is nothing
to run (stages/lib/core/ended_rounds.py has the files). So a run also costs the same after many
rounds: DVC reads and checks each stage of dvc.yaml and dvc.lock at every step.
"""

import io
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.core.addresses import split_address
from flows.core.config import ALL, KEEP, check_rerun, nest, overlay, resolve, write_params
from flows.core.locks import LOCK, METRICS, has_read, outputs
from flows.core.verdicts import failed_values, read_gate
from flows.execution.dvc_stages import open_repo
from flows.execution.integrity import drop_damaged_cache
from stages.gate.approvals import read_approval
from stages.lib.core.ended_rounds import (
    data_path,
    ended_rounds,
    files_of,
    has_ended,
    lock_path,
    metrics_path,
    settings_path,
)
from stages.lib.core.errors import BadInput
from stages.lib.core.files import ROUNDS, remove_unfinished, write_text
from stages.lib.core.params import PARAMS_FILE, Params, check_params, load_params
from stages.lib.core.reading import read_yaml

Output = Mapping[str, Any]  # of an entry: path and md5
Locks = dict[str, dict[str, Any]]
LAST_GATE = "gate_promote"  # the next round may begin although it failed


def rounds_to_end(preset: str, number: int | None, rerun: Collection[str]) -> list[str]:
    """The rounds that have ended, or end now.

    These are the complete rounds that have a successor. A preset or `rerun` asks for rounds to run
    again: these, and the rounds after them, have not ended.

    Args:
        number: how many rounds the run will have; None: those of params.yaml.
        rerun: names of ended rounds, or ALL.

    Raises:
        BadInput: `rerun` names no round of the project.
    """
    check_rerun(rerun)
    ended = list(ended_rounds())
    if preset != KEEP or ALL in rerun:
        return []
    begun = [name for name in load_params().rounds if name not in ended]
    last = (number or len(ended) + len(begun)) - 1  # its successor has not begun
    for name in begun:
        if len(ended) >= last or not is_complete(name):
            break
        ended.append(name)
    first = min((ended.index(name) for name in rerun if name in ended), default=len(ended))
    return ended[:first]


def resolve_run(
    preset: str, number: int | None, settings: Iterable[str], rerun: Collection[str] = ()
) -> tuple[Params, list[str]]:
    """The params of a run, and the rounds that have ended when it begins; nothing is written.

    Raises:
        BadInput: the params are invalid, or do not fit the ended rounds.
    """
    ended = rounds_to_end(preset, number, rerun)
    params = resolve(preset, number, settings, ended)
    _check_model(params, ended, _read_locks())
    return params, ended


def is_complete(round_: str) -> bool:
    """Whether all stages of a round have run here, each on the outputs of the others.

    The promotion gate may have failed, if no decision of a person waits for it. In a clone without
    the outputs, dvc.lock alone does not make a round complete.
    """
    locks, stages = _read_locks(), _read_yaml(Path("dvc.yaml"))["stages"]
    addresses = [
        f"{name}@{round_}"
        for name, stage in stages.items()
        if "foreach" in stage and name != LAST_GATE
    ]
    if not all(address in locks for address in addresses):
        return False
    if f"{LAST_GATE}@{round_}" not in locks and _newly_approved(round_):
        return False
    if _unavailable([out for address in addresses for out in locks[address].get("outs", [])]):
        return False
    md5s = outputs(locks)
    return all(has_read(locks[address], md5s) for address in addresses)


def _newly_approved(round_: str) -> bool:
    """Whether a person has approved the policy, and its gate has yet to read that."""
    approval, verdict = read_approval(round_, "promote"), read_gate(round_, "promote")
    return bool(
        approval
        and approval.approved
        and verdict
        and not verdict["may_continue"]
        and approval.holds_for(failed_values(verdict))
    )


def _unavailable(outs: list[Output]) -> list[Output]:
    """The outputs that are neither in this folder nor in DVC's cache."""
    missing = [out for out in outs if not Path(out["path"]).exists()]
    if not missing:
        return []
    with open_repo() as repo:
        return [out for out in missing if not repo.cache.local.exists(out["md5"])]


def write(params: Params, ended: list[str]) -> list[str]:
    """Write params.yaml; the rounds of `ended` end, other ended rounds begin again.

    If this is interrupted, the next call completes it: a round with settings of its own has ended,
    even if params.yaml still has it.

    Args:
        params: the params of the run, without the ended rounds.

    Returns:
        A line per change of params.yaml.
    """
    before, locks = ended_rounds(), _read_locks()
    history = [path for name in {*before, *ended} for path in files_of(name)]
    for path in (PARAMS_FILE, LOCK, *history):
        remove_unfinished(path)
    _check_model(params, ended, locks)
    for name in ended:
        if name not in before:
            own = {address: locks[address] for address in locks if _round_of(address) == name}
            _write_entries(lock_path(name), own)
            _write_yaml(settings_path(name), _settings(name, locks))
    again = [name for name in before if name not in ended]
    if again:
        for name in again:
            if name in params.rounds:
                locks |= read_entries(lock_path(name))
        _write_entries(LOCK, locks)
        for name in again:
            data_path(name).unlink(missing_ok=True)
    changes = write_params(params)
    # an interrupted call may have left files of a round that has begun again
    for name in {*again, *params.rounds}:
        for path in files_of(name):
            path.unlink(missing_ok=True)
    _track_as_data(ended, locks)
    return changes


def _check_model(params: Params, ended: list[str], locks: Locks) -> None:
    """A new base model has no use for adapters of another one."""
    if not ended:
        return
    last = ended[-1]
    model = (
        load_params(settings_path(last))
        if has_ended(last)
        else check_params(_settings(last, locks), last)
    ).assets.model
    if model != params.assets.model:
        raise BadInput(
            f"assets.model is {params.assets.model}, but {last} has ended with {model}: "
            f"`rondo run --rerun {ALL}` runs all rounds again, with the new model"
        )


def _round_of(address: str) -> str:
    return split_address(address)[1]


def _settings(round_: str, locks: Locks) -> dict[str, Any]:
    """The params with which the stages of a round, and those that all rounds share, have run.

    A promotion gate that failed is not in dvc.lock; it has read params.yaml.
    """
    params = load_params()
    values: dict[str, Any] = {"rounds": {round_: params.rounds[round_].model_dump()}}
    if f"{LAST_GATE}@{round_}" not in locks:
        values["gates"] = {"promote": params.gates.promote.model_dump(mode="json")}
    for address, entry in locks.items():
        if _round_of(address) in ("", round_):
            for key, value in entry.get("params", {}).get("params.yaml", {}).items():
                values = overlay(values, nest(key, value))
    return values


def _track_as_data(ended: list[str], locks: Locks) -> None:
    """Write rounds/<round>.dvc and its metrics, remove the rounds from dvc.lock, and check out what
    is missing.
    """
    for name in ended:
        if not data_path(name).exists():
            entries = read_entries(lock_path(name)).values()
            outs = [out for entry in entries for out in entry.get("outs", [])]
            # git tracks them; `dvc metrics show` finds them in a dvc.yaml
            metrics = [out for out in outs if Path(out["path"]).name == METRICS]
            paths = [str(Path(out["path"]).relative_to(ROUNDS / name)) for out in metrics]
            _write_yaml(metrics_path(name), {"metrics": paths})
            data = [out for out in outs if out not in metrics]
            _write_yaml(data_path(name), {"wdir": "..", "outs": data})
    kept = {address: entry for address, entry in locks.items() if _round_of(address) not in ended}
    if kept != locks:
        _write_entries(LOCK, kept)
    incomplete = [
        name
        for name in ended
        if not all(Path(out["path"]).exists() for out in _read_yaml(data_path(name))["outs"])
    ]
    if not incomplete:
        return
    files = [str(data_path(name)) for name in incomplete]
    try:
        with open_repo() as repo:
            repo.checkout(targets=files)
            damaged = [out for file in files for out in drop_damaged_cache(repo, file)]
        if damaged:
            raise BadInput(f"damaged in DVC's cache: {', '.join(damaged)}")
    except BadInput as error:
        raise BadInput(
            f"ended rounds ({', '.join(incomplete)}) lack outputs that are not in DVC's cache "
            f"either: `dvc pull {' '.join(files)}` fetches them from a remote, `rondo run --rerun "
            f"{incomplete[0]}` computes them again ({error})"
        ) from None


def _read_locks() -> Locks:
    """The entries of dvc.lock, without those of promotion gates that have failed since: DVC leaves
    the entry of the last time that the gate passed, with the settings of that run.
    """
    locks = read_entries(LOCK)
    md5s = outputs(locks)
    return {
        address: lock
        for address, lock in locks.items()
        if split_address(address)[0] != LAST_GATE or has_read(lock, md5s)
    }


def read_entries(path: Path) -> Locks:
    """The entries of dvc.lock, or of the part of it that an ended round has."""
    return dict(_read_yaml(path)["stages"]) if path.exists() else {}


def _write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    _write_yaml(path, {"schema": "2.0", "stages": dict(entries)})


def _read_yaml(path: Path) -> dict[str, Any]:
    return dict(read_yaml(path, f"restore it, e.g. with `git checkout {path}`"))


def _write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    writer, text = YAML(), io.StringIO()
    writer.default_flow_style = False
    writer.dump(dict(values), text)
    write_text(path, text.getvalue())
