"""The champion that a round's policy is compared with and may start from, and the anchor of KL, as
stages/gate/champion.py recorded them.

champion.json and start.json have the hashes of their weights, so that DVC runs evaluate and ppo
again when they change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field, model_validator

from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, stage_dir
from stages.lib.core.params.data import RoundName
from stages.lib.core.validation import read_json_as


class Champion(NamedTuple):
    """A promoted policy with the SFT model that it was trained from."""

    round: str
    sft: Path
    policy: Path


class ChampionRecord(BaseModel):
    """champion.json or start.json. round: None if there is none. hashes, anchor: sha256 by path."""

    round: RoundName | None
    hashes: dict[str, str] = Field(default_factory=dict)
    anchor: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def has_hashes(self) -> "ChampionRecord":
        if self.round and not self.hashes:
            raise ValueError("a champion has hashes")
        return self


def read_champion(path: Path) -> ChampionRecord:
    """The record of a champion, of the stage in whose folder it is.

    Raises:
        BadInput: the file is missing or damaged.
    """
    return read_json_as(ChampionRecord, path)


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
    recorded = read_champion(stage_dir(round_, "champion") / name)
    champion_round = recorded.round
    if champion_round is None:
        return None
    _check_hashes(recorded.hashes, round_)
    sft, ppo = stage_dir(champion_round, "sft"), stage_dir(champion_round, "ppo")
    return Champion(champion_round, sft / "model", ppo / "policy")


def anchor_path(round_: str) -> Path:
    """The SFT model of the first round, which KL is also measured from; in the first round its own.

    Raises:
        BadInput: its files are not those that champion.json recorded.
    """
    path = stage_dir(round_, "champion") / "champion.json"
    anchor = read_champion(path).anchor
    _check_hashes(anchor, round_)
    return Path(next(iter(anchor), stage_dir(round_, "sft") / "model"))


def _check_hashes(hashes: Mapping[str, str], round_: str) -> None:
    for name, recorded_hash in hashes.items():
        if not Path(name).exists() or file_hash(Path(name)) != recorded_hash:
            raise BadInput(
                f"{name} is not the version in {stage_dir(round_, 'champion')}/champion.json: run "
                f"`dvc checkout {name}`, or `dvc repro champion@{round_}`"
            )
