"""`--dry-run`: what a run would do and need. Nothing is run, and the project stays as it is."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.core.addresses import split_address
from flows.core.config import changes_of_params
from flows.core.locks import read_locks
from flows.core.tables import print_json
from flows.execution import dvc_stages, needs
from flows.execution.history import open_rounds, resolve_run
from stages.gate.verdict import look_up
from stages.lib.core.files import work_dir
from stages.lib.core.params import PARAMS_FILE, Params
from stages.lib.core.params.policy import Engine
from stages.lib.core.reading import read_yaml
from stages.lib.core.user_inputs import INPUTS, input_hashes, recorded_hashes
from stages.ppo.engines import make_job


def dry_run(
    preset: str,
    rounds: int | None,
    settings: list[str],
    rerun: list[str],
    as_json: bool = False,
) -> int:
    """Print it for `rondo run`, whose arguments these are; returns the exit code.

    As JSON: `changes` of params.yaml, `ended` rounds, `needs` (lines), the stages that it
    `would_run`, and `engine_commands`.

    Raises:
        BadInput: as a run would raise it before it starts.
        RondoError: the stages would not fit in memory or on disk.
    """
    params, ended = resolve_run(preset, rounds, settings, rerun)
    changes = changes_of_params(params)
    addresses = addresses_of(open_rounds(params, ended))
    waiting = stages_that_would_run(params, addresses)
    if as_json:
        lines: list[str] = []
        needs.check(params, addresses, waiting, lines.append)
        print_json(
            {
                **{"changes": changes, "ended": ended, "needs": lines},
                "would_run": [name for name in addresses if name in waiting],
                "engine_commands": engine_commands(params, waiting),
            }
        )
        return 0
    title = "params.yaml would change:" if changes else "params.yaml: no changes"
    print("\n  ".join([title, *changes]))
    if ended:
        print(f"ended, not run again (--rerun does): {', '.join(ended)}")
    needs.check(params, addresses, waiting, print)
    if waiting:
        print(f"would run: {', '.join(name for name in addresses if name in waiting)}")
        for line in engine_commands(params, waiting):
            print(line)
        print("nothing was run")
    return 0


def engine_commands(params: Params, waiting: set[str]) -> list[str]:
    """The commands of the engine's jobs, one per round; the folder of a job has a name that its
    inputs determine.
    """
    if params.ppo.engine is Engine.local:
        return []
    lines = []
    for stage, round_ in map(split_address, sorted(waiting)):
        if stage == "ppo":
            job = make_job(params, round_, work_dir(round_, "ppo") / "RUN")
            lines.append(f"ppo@{round_}: {shlex.join(job.words())}")
    return lines


def addresses_of(rounds: list[str]) -> list[str]:
    """The stages of a run with these rounds, in the order of dvc.yaml, round after round."""
    stages = read_yaml(Path("dvc.yaml"), "correct it")["stages"]
    once = [name for name, stage in stages.items() if "foreach" not in stage]
    each = [name for name, stage in stages.items() if "foreach" in stage]
    return [
        *(name for name in once if name != dvc_stages.INPUTS),
        *(f"{name}@{round_}" for round_ in rounds for name in each),
    ]


def stages_that_would_run(params: Params, addresses: list[str]) -> set[str]:
    """The stages that are not up to date with these params, or that depend on one that is not.

    All stages of a round that params.yaml does not have are among them, and of the rounds after it.
    """
    rounds = list(dict.fromkeys(split_address(address)[1] for address in addresses))
    graph, status = dvc_stages.graph_and_changes(rounds)
    entries, values = read_locks(), params.model_dump(mode="json")
    new_inputs = {
        str(INPUTS / f"{kind}.json")
        for kind, hashes in input_hashes(params).items()
        if recorded_hashes(kind) != hashes
    }
    missing = [split_address(address)[1] for address in addresses if address not in graph]
    first = min(map(rounds.index, missing), default=len(rounds))
    changed = {
        address
        for address in addresses
        if split_address(address)[1] in rounds[first:]
        or has_changed_files(status.get(address, []))
        or reads_other_values(entries.get(address, {}), values)
        or any(dep["path"] in new_inputs for dep in entries.get(address, {}).get("deps", []))
    }
    return dvc_stages.with_dependents(addresses, changed, graph)


def has_changed_files(changes: list[Any]) -> bool:
    """Whether DVC's status of a stage has more than params with other values.

    >>> has_changed_files([{"changed deps": {"params.yaml": {"ppo": "modified"}}}])
    False
    >>> has_changed_files([{"changed deps": {"params.yaml": {"ppo": "new"}}}])
    True
    >>> has_changed_files([{"changed outs": {"model": "deleted"}}])
    True
    """
    return any(
        isinstance(change, str)
        or any(
            path != str(PARAMS_FILE) or set(state.values()) != {"modified"}
            for paths in change.values()
            for path, state in paths.items()
        )
        for change in changes
    )


def reads_other_values(entry: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a stage has run with other values of its params, or has not run."""
    recorded = entry.get("params", {}).get(str(PARAMS_FILE), {})
    return not entry or any(look_up(values, key) != value for key, value in recorded.items())
