"""The champion that evaluate compares the policy with, as stages/gate/champion.py recorded it.

champion.json has the hashes of the champion's weights, so that DVC runs evaluate again when they
change.
"""

from pathlib import Path
from typing import NamedTuple

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, read_json, stage_dir


class Champion(NamedTuple):
    """A promoted policy with the SFT model that it was trained from."""

    round: str
    sft: Path
    policy: Path


def load_champion(round_: str) -> Champion | None:
    """The champion of this round's evaluation; None if no policy has been promoted yet.

    Raises:
        BadInput: the files on disk are not those that became champion.
    """
    path = stage_dir(round_, "champion") / "champion.json"
    recorded = read_json(path, f"dvc repro champion@{round_}")
    champion_round = recorded["round"]
    if champion_round is None:
        return None
    for name, recorded_hash in recorded["hashes"].items():
        if not Path(name).exists() or file_hash(Path(name)) != recorded_hash:
            raise BadInput(
                f"{name} is not the version that became champion: run `dvc checkout {name}`, "
                f"or `dvc repro champion@{round_}`"
            )
    sft, ppo = stage_dir(champion_round, "sft"), stage_dir(champion_round, "ppo")
    return Champion(champion_round, sft / "model", ppo / "policy")
