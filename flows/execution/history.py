"""Ended rounds are history: no changed setting and no edited code runs them again.

A round ends when all of its stages have run and a later round begins. A run then leaves its stages
out, and its settings are kept in `rounds/<round>/params.yaml` (stages/lib/core/ended_rounds.py).
"""

import io
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.core.addresses import split_address
from flows.core.config import ALL, KEEP, check_rerun, nest, overlay, resolve, write_params
from flows.core.locks import METRICS, has_read, outputs, read_locks
from flows.core.verdicts import failed_values, read_gate
from flows.execution.dvc_stages import open_repo
from stages.gate.approvals import read_approval
from stages.lib.core.ended_rounds import ended_names, has_ended, settings_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import remove_unfinished, write_text
from stages.lib.core.params import PARAMS_FILE, Params, check_params, load_params
from stages.lib.core.reading import read_yaml

Locks = dict[str, dict[str, Any]]
LAST_GATE = "gate_promote"  # the next round may begin although it failed


def rounds_to_end(params: Params, preset: str, rerun: Collection[str]) -> list[str]:
    """The rounds of a run that have ended, or end now: the complete ones that another one follows.

    A preset or `rerun` asks for rounds to run again: these, and the rounds after them, have not
    ended.

    Args:
        params: the params of the run.
        rerun: names of rounds, or ALL.

    Raises:
        BadInput: all rounds of the run have ended, or the base model is not theirs.
    """
    if preset != KEEP or ALL in rerun:
        return []
    *earlier, last = params.rounds
    begun = load_params().rounds  # dvc.lock also has rounds that params.yaml has dropped

    def is_over(name: str) -> bool:
        return name not in rerun and (has_ended(name) or (name in begun and is_complete(name)))

    ended = list(takewhile(is_over, earlier))
    if ended == earlier and last not in rerun and has_ended(last):
        raise BadInput(
            f"--rounds {len(params.rounds)}: {', '.join(params.rounds)} have ended; ask for at "
            f"least {len(params.rounds) + 1} rounds, or add `--rerun ROUND` to run a round again"
        )
    if ended:
        _check_model(params, ended[-1])
    return ended


def resolve_run(
    preset: str, number: int | None, settings: Iterable[str], rerun: Collection[str] = ()
) -> tuple[Params, list[str]]:
    """The params of a run, and the rounds that have ended when it begins; nothing is written.

    Raises:
        BadInput: the params are invalid, or do not fit the ended rounds.
    """
    check_rerun(rerun)
    params = resolve(preset, number, settings)
    return params, rounds_to_end(params, preset, rerun)


def open_rounds(params: Params, ended: Collection[str]) -> list[str]:
    """The rounds that a run runs."""
    return [name for name in params.rounds if name not in ended]


def is_complete(round_: str) -> bool:
    """Whether all stages of a round have run here, each on the outputs of the others.

    The promotion gate may have failed, if no decision of a person waits for it. In a clone without
    the outputs, dvc.lock alone does not make a round complete.
    """
    locks, stages = _read_locks(), read_yaml(Path("dvc.yaml"), "correct it")["stages"]
    addresses = [
        f"{name}@{round_}"
        for name, stage in stages.items()
        if "foreach" in stage and name != LAST_GATE
    ]
    if not all(address in locks for address in addresses):
        return False
    if f"{LAST_GATE}@{round_}" not in locks:
        has_run = LAST_GATE not in stages or read_gate(round_, "promote")
        if not has_run or _newly_approved(round_):
            return False
    missing = [out for address in addresses for out in _missing(locks[address])]
    if missing:
        with open_repo() as repo:
            if not all(repo.cache.local.exists(out["md5"]) for out in missing):
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


def _missing(lock: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The outputs of a stage, each with path and md5, that are not in this folder."""
    return [out for out in lock.get("outs", []) if not Path(out["path"]).exists()]


def write(params: Params, ended: Collection[str]) -> list[str]:
    """Write params.yaml; the rounds of `ended` end, other ended rounds begin again.

    If this is interrupted, the next call completes it.

    Returns:
        A line per change of params.yaml.
    """
    before = ended_names()
    for path in (PARAMS_FILE, *map(settings_path, {*before, *ended})):
        remove_unfinished(path)
    for name in ended:
        if name not in before:
            write_text(settings_path(name), _yaml_text(_settings(name)))
    for name in before.difference(ended):
        settings_path(name).unlink()
    changes = write_params(params)
    _check_out(ended)
    return changes


def _check_model(params: Params, round_: str) -> None:
    """A new base model has no use for adapters of another one."""
    own = load_params(settings_path(round_)) if has_ended(round_) else _past_params(round_)
    if own.assets.model != params.assets.model:
        raise BadInput(
            f"assets.model is {params.assets.model}, but {round_} has ended with "
            f"{own.assets.model}: `rondo run --rerun {ALL}` runs all rounds again, with the new "
            "model"
        )


def _past_params(round_: str) -> Params:
    try:
        return check_params(_settings(round_), "dvc.lock")
    except BadInput as error:
        raise BadInput(
            f"{round_} has run with settings that this version does not take ({error}): "
            f"`rondo run --rerun {round_}` runs it again, with those of {PARAMS_FILE}"
        ) from None


def _settings(round_: str) -> dict[str, Any]:
    """The params with which the stages of a round, and those that all rounds share, have run.

    A promotion gate that failed is not in dvc.lock; it has read params.yaml.
    """
    params, locks = load_params(), _read_locks()
    values: dict[str, Any] = {"rounds": {round_: params.rounds[round_].model_dump()}}
    if f"{LAST_GATE}@{round_}" not in locks:
        values["gates"] = {"promote": params.gates.promote.model_dump(mode="json")}
    for address, entry in locks.items():
        if split_address(address)[1] in ("", round_):
            for key, value in entry.get("params", {}).get("params.yaml", {}).items():
                values = overlay(values, nest(key, value))
    return values


def _check_out(ended: Collection[str]) -> None:
    """Take from DVC's cache what this folder lacks of ended rounds.

    Raises:
        BadInput: it is not there.
    """
    incomplete = [
        address
        for address, lock in _read_locks().items()
        if split_address(address)[1] in ended
        # metrics are in git
        and any(Path(out["path"]).name != METRICS for out in _missing(lock))
    ]
    if not incomplete:
        return
    try:
        with open_repo() as repo:
            repo.checkout(targets=incomplete)
    except BadInput as error:
        names = list(dict.fromkeys(split_address(address)[1] for address in incomplete))
        raise BadInput(
            f"ended rounds ({', '.join(names)}) lack outputs that are not in DVC's cache either: "
            f"`dvc pull {' '.join(incomplete)}` fetches them from a remote, `rondo run --rerun "
            f"{names[0]}` computes them again ({error})"
        ) from None


def _read_locks() -> Locks:
    """The entries of dvc.lock, without those of promotion gates that have failed since: DVC leaves
    the entry of the last time that the gate passed, with the settings of that run.
    """
    locks = read_locks()
    md5s = outputs(locks)
    return {
        address: lock
        for address, lock in locks.items()
        if split_address(address)[0] != LAST_GATE or has_read(lock, md5s)
    }


def _yaml_text(values: Mapping[str, Any]) -> str:
    writer, text = YAML(), io.StringIO()
    writer.default_flow_style = False
    writer.dump(dict(values), text)
    return text.getvalue()
