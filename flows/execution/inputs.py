"""The stage `inputs`: which of the user's own files have changed since the last run."""

from pathlib import Path

from flows.core.services import LogLine
from flows.execution import dvc_stages
from stages.lib.core import user_inputs
from stages.lib.core.files import read_json, write_json
from stages.lib.core.params import Params


def refresh(params: Params, home: Path, log: LogLine) -> None:
    """Run the stage `inputs` if it would write other hashes, and log which files have changed.

    Args:
        home: the .rondo folder; it keeps the hashes of the last run, in whatever folder that was.
    """
    hashes = user_inputs.input_hashes(params)
    if not user_inputs.are_recorded(hashes):
        dvc_stages.run(dvc_stages.INPUTS, lambda _: None)
    last_run = home / "inputs.json"
    before = read_json(last_run, f"rm {last_run}") if last_run.exists() else {}
    now = {path: digest for kind in hashes.values() for path, digest in kind.items()}
    if changed := [path for path in user_inputs.differing(before, now) if path in before]:
        log(f"changed since the last run: {', '.join(changed)}")
    if now != before:
        write_json(last_run, now)
