"""`--dry-run`: what a run would do and need. Nothing is run, and the project stays as it is."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from flows.core.addresses import split_address
from flows.core.config import KEEP, changes_of_params, one_more_round, resolve
from flows.core.locks import read_lock
from flows.execution import dvc_stages, estimate, machine
from flows.execution.history import rounds_to_end
from stages.lib.core.params import PARAMS_FILE, Params
from stages.lib.core.user_inputs import INPUTS, input_hashes, recorded_hashes


def dry_run(preset: str, rounds: int | None, settings: list[str], rerun: list[str]) -> int:
    """Print it for `rondo run`, whose arguments these are; returns the exit code.

    Raises:
        BadInput: as a run would raise it before it starts.
        RondoError: the stages would not fit in memory or on disk.
    """
    ended = rounds_to_end(preset, rounds, rerun)
    params = resolve(preset, rounds, settings, ended=ended)
    for line in plan(params, ended):
        print(line)
    return 0


def dry_next_round(settings: list[str]) -> int:
    """`dry_run` for `rondo next-round`."""
    return dry_run(KEEP, one_more_round(), settings, [])


def plan(params: Params, ended: list[str]) -> Iterator[str]:
    changes = changes_of_params(params)
    title = "params.yaml would change:" if changes else "params.yaml: no changes"
    yield "\n  ".join([title, *changes])
    if ended:
        yield f"ended, not run again (--rerun does): {', '.join(ended)}"
    addresses = addresses_of(params)
    waiting = stages_that_would_run(params, addresses)
    disk_needed = estimate.disk_bytes(params, waiting)
    estimate.check_disk(disk_needed, waiting)
    here = machine.measure() if waiting else None
    sizes = estimate.check_memory(params, waiting, here) if here else None
    yield from estimate.report(params, addresses, waiting, disk_needed, here, sizes)
    if waiting:
        yield f"would run: {', '.join(name for name in addresses if name in waiting)}"
        yield "nothing was run"


def addresses_of(params: Params) -> list[str]:
    """The stages of a run with these params, in the order of dvc.yaml, round after round."""
    stages = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    once = [name for name, stage in stages.items() if "foreach" not in stage]
    each = [name for name, stage in stages.items() if "foreach" in stage]
    return [
        *(name for name in once if name != dvc_stages.INPUTS),
        *(f"{name}@{round_}" for round_ in params.rounds for name in each),
    ]


def stages_that_would_run(params: Params, addresses: list[str]) -> set[str]:
    """The stages that are not up to date with these params, or that depend on one that is not.

    All stages of a round that params.yaml does not have are among them, and of the rounds after it:
    a new one, and an ended one that runs again, though DVC may then find some of them unchanged.
    """
    import networkx

    with dvc_stages.open_repo() as repo:
        status, graph = repo.status(), dvc_stages.order_graph(repo)
    values = params.model_dump(mode="json")
    new_inputs = {
        str(INPUTS / f"{kind}.json")
        for kind, hashes in input_hashes(params).items()
        if recorded_hashes(kind) != hashes
    }
    rounds = list(params.rounds)
    missing = [split_address(address)[1] for address in addresses if address not in graph]
    first = min(map(rounds.index, missing), default=len(rounds))
    changed = {
        address
        for address in addresses
        if split_address(address)[1] in rounds[first:]
        or has_changed_files(status.get(address, []))
        or reads_other_values(read_lock(address), values)
        or any(dep["path"] in new_inputs for dep in read_lock(address).get("deps", []))
    }
    return {
        address
        for address in addresses
        if address in changed or networkx.ancestors(graph, address) & changed
    }


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
    return not entry or any(value_at(values, key) != value for key, value in recorded.items())


def value_at(values: Any, key: str) -> Any:
    """The value at a dotted key; None if there is none, e.g. since it has another name now.

    >>> value_at({"sft": {"lora": {"r": 8}}}, "sft.lora.r")
    8
    """
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
