"""Whose policy a round must not lose to: the last round before it that passed its promotion gate,
or that a person let through.

A fold over rounds: the champion of the round before, or that round's own policy. A champion that
was taken back (`rondo promote --rollback`) is none. No model is loaded here:
stages/evaluate/champion.py reads what this writes.
"""

from pathlib import Path

from stages.gate.approvals import read_rollback
from stages.gate.verdict import evaluate_gate, passed_or_approved
from stages.lib.core.files import ROUNDS, file_hash, read_json, stage_dir, write_json
from stages.lib.core.params import Params
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row

NO_CHAMPION: Row = {"round": None}


def main(params: Params, round_: str) -> None:
    previous = Path(params.rounds[round_].previous)
    write_json(
        stage_dir(round_, "champion") / "champion.json",
        champion_after(params, previous) if previous.parent == ROUNDS else NO_CHAMPION,
    )


def champion_after(params: Params, previous: Path) -> Row:
    """Who is champion once the promotion gate of the round in `previous` has spoken."""
    round_, policy, sft = previous.name, previous / "ppo/policy", previous / "sft/model"
    taken_back, weights = read_rollback(round_), file_hash(policy)
    if taken_back and taken_back.policy == weights:
        print(
            f"[champion] {round_} was taken back by {taken_back.by}: {taken_back.reason}",
            flush=True,
        )
    elif passed_or_approved(evaluate_gate(params, "promote", round_)):
        return {"round": round_, "hashes": {str(policy): weights, str(sft): file_hash(sft)}}
    return dict(read_json(previous / "champion/champion.json", f"dvc repro champion@{round_}"))


if __name__ == "__main__":
    stage_main("champion", main)
