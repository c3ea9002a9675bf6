"""The champion that a round's policy is compared with and may start from, and the anchor of KL, as
stages/gate/champion.py recorded them.

champion.json and start.json have the hashes of their weights, so that DVC runs evaluate and ppo
again when they change.
"""

from collections.abc import Mapping
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
    """The champion before this round; None if no policy has been promoted yet.

    Raises:
        BadInput: the files on disk are not those that became champion.
    """
    return _load(round_, "champion.json")


def load_start(round_: str) -> Champion | None:
    """The champion whose weights PPO starts from; None if it starts as the SFT model.

    Raises:
        BadInput: the files on disk are not those that became champion.
    """
    return _load(round_, "start.json")


def _load(round_: str, name: str) -> Champion | None:
    recorded = read_json(stage_dir(round_, "champion") / name, f"dvc repro champion@{round_}")
    champion_round = recorded["round"]
    if champion_round is None:
        return None
    _check_hashes(recorded["hashes"], round_)
    sft, ppo = stage_dir(champion_round, "sft"), stage_dir(champion_round, "ppo")
    return Champion(champion_round, sft / "model", ppo / "policy")


def anchor_path(round_: str) -> Path:
    """The SFT model of the first round, which KL is also measured from; in the first round its own.

    Raises:
        BadInput: its files are not those that champion.json recorded.
    """
    path = stage_dir(round_, "champion") / "champion.json"
    anchor = read_json(path, f"dvc repro champion@{round_}").get("anchor", {})
    _check_hashes(anchor, round_)
    return Path(next(iter(anchor), stage_dir(round_, "sft") / "model"))


def _check_hashes(hashes: Mapping[str, str], round_: str) -> None:
    for name, recorded_hash in hashes.items():
        if not Path(name).exists() or file_hash(Path(name)) != recorded_hash:
            raise BadInput(
                f"{name} is not the version in {stage_dir(round_, 'champion')}/champion.json: run "
                f"`dvc checkout {name}`, or `dvc repro champion@{round_}`"
            )
