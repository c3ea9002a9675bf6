"""The stage `inputs`: hash the user's own files that params.yaml names.

DVC runs it every time, so that a stage runs again if a file has changed that only params.yaml
names: data, a model folder, a scoring function or a module of the project that it imports, the
constitution.
Outputs: assets/inputs/<kind>.json per kind of user_inputs.py, with the sha256 of each file.
Run: `python -m stages.assets.inputs`.
"""

from stages.lib.core.files import write_json
from stages.lib.core.params import Params
from stages.lib.core.stage import stage_main
from stages.lib.core.user_inputs import INPUTS, differing, input_hashes, recorded_hashes


def main(params: Params, round_: str) -> None:
    """Write the hashes, and print what has changed since they were written last."""
    for kind, hashes in input_hashes(params).items():
        recorded = recorded_hashes(kind)
        before = recorded or {}
        for path in differing(before, hashes):
            print(f"[inputs] {path}: {'changed' if path in before else 'new'}", flush=True)
        if recorded != hashes:
            write_json(INPUTS / f"{kind}.json", hashes)


if __name__ == "__main__":
    stage_main("inputs", main)
