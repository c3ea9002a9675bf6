"""The champion that a round meets, from the file that stages/gate/champion.py writes: it has the
weights by hash, so that DVC evaluates anew when they change."""

from pathlib import Path
from typing import NamedTuple

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, read_json, stage_dir


class Champion(NamedTuple):
    """A policy with the SFT model that it was trained from."""

    round: str
    sft: Path
    policy: Path


def load_champion(round_: str) -> Champion | None:
    """The champion that this round meets; None where nobody has been promoted yet.

    Raises:
        BadInput: its files are not those that became champion.
    """
    told = read_json(
        stage_dir(round_, "champion") / "champion.json", f"dvc repro champion@{round_}"
    )
    if told["round"] is None:
        return None
    for path, known in told["hashes"].items():
        if not Path(path).exists() or file_hash(Path(path)) != known:
            raise BadInput(
                f"{path} is not what became champion: run `dvc checkout {path}`, or `dvc repro champion@{round_}`"
            )
    return Champion(
        told["round"],
        stage_dir(told["round"], "sft") / "model",
        stage_dir(told["round"], "ppo") / "policy",
    )
