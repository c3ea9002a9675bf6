"""The champion stage: which earlier policy must a round's policy not lose to, and start from?

The champion is the policy of the last earlier round that passed its promotion gate or was approved,
or the one that a person chose after that (`rondo promote`). It is computed round by round: the
champion after a round is the chosen policy, or that round's own, or else the champion before it.
Reads the previous round's champion.json, metrics and approvals; writes two files in
rounds/<round>/champion, which stages/lib/core/champion.py reads. champion.json also has the anchor:
the SFT model of the first round, from which the KL of all rounds' policies is measured. start.json
has the champion if PPO starts from it, so that another champion reruns PPO only then. Loads no
model.

Run: `python -m stages.gate.champion --round r1`.
"""

from pathlib import Path

from stages.gate.approvals import read_rollback
from stages.gate.verdict import evaluate_gate, passed_or_approved
from stages.lib.core.champion import ChampionRecord, read_champion
from stages.lib.core.ended_rounds import has_ended, params_of
from stages.lib.core.files import ROUNDS, file_hash, stage_dir, write_json
from stages.lib.core.params import Params
from stages.lib.core.params.policy import PolicyStart
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Metrics

NO_CHAMPION: Metrics = {"round": None}


def main(params: Params, round_: str) -> None:
    previous = Path(params.rounds[round_].previous)
    # the first round has a placeholder outside rounds/ as its previous one
    is_first = previous.parent != ROUNDS
    champion = NO_CHAMPION if is_first else champion_after(params, previous)
    warm = params.ppo.init_from is PolicyStart.champion
    anchor = {} if is_first else {"anchor": anchor_of(params, previous)}
    folder = stage_dir(round_, "champion")
    write_json(folder / "champion.json", {**champion, **anchor})
    write_json(folder / "start.json", champion if warm else NO_CHAMPION)


def anchor_of(params: Params, previous: Path) -> dict[str, str]:
    """The SFT model of the first of the rounds before, with its hash."""
    while (entry := params.rounds.get(previous.name)) and Path(entry.previous).parent == ROUNDS:
        previous = Path(entry.previous)
    sft = previous / "sft/model"
    return {str(sft): file_hash(sft)}


def champion_after(params: Params, previous: Path) -> Metrics:
    """The champion after the promotion gate of the round in `previous`, as start.json has it."""
    round_, policy, sft = previous.name, previous / "ppo/policy", previous / "sft/model"
    rollback, policy_hash = read_rollback(round_), file_hash(policy)
    # an ended round has the thresholds of its own settings
    gate_params = params_of(round_) if has_ended(round_) else params
    if rollback and rollback.policy == policy_hash:
        chosen, reason = rollback.champion, f"by {rollback.by}: {rollback.reason}"
        print(f"[champion] {chosen.round} was chosen after {round_} {reason}", flush=True)
        return _as_recorded(chosen)
    if passed_or_approved(evaluate_gate(gate_params, "promote", round_)):
        return {"round": round_, "hashes": {str(policy): policy_hash, str(sft): file_hash(sft)}}
    return _as_recorded(read_champion(previous / "champion/champion.json"))


def _as_recorded(champion: ChampionRecord) -> Metrics:
    """The champion as start.json has it, without the anchor."""
    record = champion.model_dump(exclude={"anchor"}, exclude_defaults=True)
    return record | {"round": champion.round}


if __name__ == "__main__":
    stage_main("champion", main)
