"""The champion over rounds that pass, fail, are approved and rolled back, with the real gate."""

import json
from pathlib import Path

import pytest
import yaml

from stages.gate.approvals import Approval, Rollback, rollback_path, write_approval
from stages.gate.champion import main
from stages.lib.core.champion import ChampionRecord, anchor_path, load_champion, load_start
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json, write_text
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import rounds
from stages.lib.core.params.policy import PolicyStart

GOOD = {
    "evaluate": {
        "win_rate_low": 0.7,
        "win_rate_champion_low": None,
        "human_nll_rise": 0.5,
        "sft": {"repetition_3": 0.0, "eos_rate": 0.7},
        "ppo": {"kl_per_token": 0.4, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.8},
    },
    "ppo": {"dangers": 0},
    "replay": {"regressed": 0},
    "capability": {"worst_fall": None},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_round(round_: str, win_rate_low: float) -> None:
    """The metrics and models of a round; each round has another policy."""
    for stage, metrics in GOOD.items():
        changes = {"win_rate_low": win_rate_low} if stage == "evaluate" else {}
        write_json(Path("rounds") / round_ / stage / "metrics.json", metrics | changes)
    write_text(Path("rounds") / round_ / "ppo/policy/adapter.bin", f"the policy of {round_}")
    write_text(Path("rounds") / round_ / "sft/model/model.bin", f"the model of {round_}")


def champions(policy: str = "block", number: int = 5) -> list[str | None]:
    """For each of r0, r1, ... the round of the champion that its policy is compared with."""
    params = params_of(policy)
    names = list(params.rounds)[:number]
    for name in names:
        main(params, name)
    loaded = [load_champion(name) for name in names]
    return [champion.round if champion else None for champion in loaded]


def params_of(policy: str) -> Params:
    named = {name: entry.model_dump() for name, entry in rounds(5).items()}
    return check_params({"rounds": named, "gates": {"promote": {"policy": policy}}}, "test")


def test_the_last_policy_that_passed_is_champion() -> None:
    for name, low in {"r0": 0.6, "r1": 0.4, "r2": 0.7, "r3": 0.4}.items():
        write_round(name, low)
    assert champions() == [None, "r0", "r0", "r2", "r2"]
    assert load_champion("r3") == ("r2", Path("rounds/r2/sft/model"), Path("rounds/r2/ppo/policy"))
    # whoever is champion, KL is measured from the first round's SFT
    anchors = [anchor_path(f"r{number}") for number in range(5)]
    assert anchors == [Path("rounds/r0/sft/model")] * 5
    write_text(Path("rounds/r0/sft/model/model.bin"), "another")
    assert anchor_path("r0") == anchors[0]
    with pytest.raises(BadInput, match=r"rounds/r0/sft/model is not the version in rounds/r4/"):
        anchor_path("r4")


def test_ppo_starts_from_the_champion_only_if_params_say_so() -> None:
    write_round("r0", 0.6)
    write_round("r1", 0.4)  # not promoted: r2's champion is that of r1's champion.json
    params = params_of("block")
    params.ppo.init_from = PolicyStart.sft
    for name in ("r0", "r1", "r2"):
        main(params, name)
    assert [load_start(name) for name in ("r0", "r1", "r2")] == [None] * 3
    params.ppo.init_from = PolicyStart.champion
    for name in ("r0", "r1", "r2"):
        main(params, name)
    assert [load_start(name) for name in ("r0", "r1", "r2")] == [
        None,
        load_champion("r1"),
        load_champion("r1"),
    ]
    # DVC reruns PPO if start.json changes: it has nothing but the champion
    starts = [Path(f"rounds/{name}/champion/start.json").read_text() for name in ("r1", "r2")]
    assert starts[0] == starts[1] and "anchor" not in starts[0]
    write_text(Path("rounds/r0/ppo/policy/adapter.bin"), "another")
    with pytest.raises(BadInput, match=r"rounds/r0/ppo/policy is not the version in"):
        load_start("r1")


def decide(round_: str, approved: bool, reason: str) -> None:
    failed: dict[str, float | None] = {"evaluate.win_rate_low": 0.4}
    approval = Approval(approved=approved, by="Ada", reason=reason, failed=failed)
    write_approval(round_, "promote", approval)


def test_a_policy_that_only_had_a_warning_is_no_champion() -> None:
    for name in ("r0", "r1", "r2", "r3"):
        write_round(name, 0.4)
    assert champions("warn") == [None] * 5


def test_an_approved_policy_is_champion() -> None:
    for name in ("r0", "r1", "r2", "r3"):
        write_round(name, 0.4)
    decide("r1", approved=True, reason="read them all")
    decide("r2", approved=False, reason="a hack")
    assert champions("ask") == [None, None, "r1", "r1", "r1"]


def test_an_ended_round_keeps_its_own_thresholds() -> None:
    write_round("r0", 0.4)
    write_round("r1", 0.4)
    own = params_of("block")
    own.gates.promote.win_rate = 0.3
    write_text(Path("rounds/r0/params.yaml"), yaml.safe_dump(own.model_dump(mode="json")))
    assert champions(number=3) == [None, "r0", "r0"]
    Path("rounds/r0/params.yaml").unlink()
    assert champions(number=3) == [None, None, None]


def test_a_policy_that_was_rolled_back_is_no_champion_but_a_new_one_of_its_round_may_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_round("r0", 0.6)
    write_round("r1", 0.6)
    policy = file_hash(Path("rounds/r1/ppo/policy"))
    hashes = {
        path: file_hash(Path(path)) for path in ("rounds/r0/ppo/policy", "rounds/r0/sft/model")
    }
    chosen = ChampionRecord(round="r0", hashes=hashes)
    rollback = Rollback(by="Ada", reason="one ending for all", policy=policy, champion=chosen)
    write_json(rollback_path("r1"), rollback.model_dump())
    assert champions(number=3) == [None, "r0", "r0"]
    line = "[champion] r0 was chosen after r1 by Ada: one ending for all"
    assert line in capsys.readouterr().out.splitlines()
    write_text(Path("rounds/r1/ppo/policy/adapter.bin"), "trained anew")
    assert champions(number=3) == [None, "r0", "r1"]


def test_a_file_that_is_no_rollback() -> None:
    write_round("r0", 0.6)
    rollback = {"by": "Ada", "reason": "why", "policy": "the last"}
    write_text(rollback_path("r0"), json.dumps(rollback))
    main(params_of("block"), "r0")
    message = (
        r"approvals/r0/taken_back.json: not a valid rollback: policy.*`rondo promote --rollback`"
    )
    with pytest.raises(BadInput, match=message):
        main(params_of("block"), "r1")


def test_files_that_are_not_those_of_the_champion() -> None:
    write_round("r0", 0.6)
    assert champions(number=2) == [None, "r0"]
    write_text(Path("rounds/r0/sft/model/model.bin"), "another")
    message = (
        r"rounds/r0/sft/model is not the version in rounds/r1/champion/champion\.json: "
        r"run `dvc checkout rounds/r0/sft/model`"
    )
    with pytest.raises(BadInput, match=message):
        load_champion("r1")
