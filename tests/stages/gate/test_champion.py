"""Whose policy a round must not lose to, over rounds that pass, fail, are approved and taken back;
the gate is the real one.
"""

import json
from pathlib import Path

import pytest

from stages.evaluate.champion import load_champion
from stages.gate.approvals import Approval, Rollback, taken_back_path, write_approval
from stages.gate.champion import main
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json, write_text
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import rounds

GOOD = {
    "evaluate": {
        "win_rate_low": 0.7,
        "win_rate_champion_low": None,
        "human_nll_rise": 0.5,
        "sft": {"repetition_3": 0.0, "eos_rate": 0.7},
        "ppo": {"kl": 5.0, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.8},
    },
    "ppo": {"dangers": 0},
    "replay": {"regressed": 0},
    "capability": {"worst_fall": None},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def played(round_: str, win_rate_low: float) -> None:
    """What a round leaves behind, with policies that differ."""
    for stage, metrics in GOOD.items():
        told = metrics | ({"win_rate_low": win_rate_low} if stage == "evaluate" else {})
        write_json(Path("rounds") / round_ / stage / "metrics.json", told)
    write_text(Path("rounds") / round_ / "ppo/policy/adapter.bin", f"the policy of {round_}")
    write_text(Path("rounds") / round_ / "sft/model/model.bin", f"the model of {round_}")


def champions(policy: str = "block", number: int = 5) -> list[str | None]:
    """The round of the champion that each of r0, r1, ... meets."""
    params = params_of(policy)
    for name in list(params.rounds)[:number]:
        main(params, name)
    return [
        found.round if (found := load_champion(name)) else None
        for name in list(params.rounds)[:number]
    ]


def params_of(policy: str) -> Params:
    named = {name: entry.model_dump() for name, entry in rounds(5).items()}
    return check_params({"rounds": named, "gates": {"promote": {"policy": policy}}}, "test")


def test_the_last_that_passed_is_champion() -> None:
    for name, low in {"r0": 0.6, "r1": 0.4, "r2": 0.7, "r3": 0.4}.items():
        played(name, low)
    assert champions() == [None, "r0", "r0", "r2", "r2"]
    assert load_champion("r3") == ("r2", Path("rounds/r2/sft/model"), Path("rounds/r2/ppo/policy"))


def test_nobody_vouches_for_what_was_only_warned_of() -> None:
    for name in ("r0", "r1", "r2", "r3"):
        played(name, 0.4)
    assert champions("warn") == [None] * 5


def test_a_person_may_let_one_through() -> None:
    for name in ("r0", "r1", "r2", "r3"):
        played(name, 0.4)
    write_approval(
        "r1",
        "promote",
        Approval(
            approved=True, by="Ada", reason="read them all", failed={"evaluate.win_rate_low": 0.4}
        ),
    )
    write_approval(
        "r2",
        "promote",
        Approval(approved=False, by="Ada", reason="a hack", failed={"evaluate.win_rate_low": 0.4}),
    )
    assert champions("ask") == [None, None, "r1", "r1", "r1"]


def test_one_that_was_taken_back_is_champion_no_more_but_its_successor_may_be() -> None:
    played("r0", 0.6)
    played("r1", 0.6)
    word = Rollback(
        by="Ada", reason="one ending for all", policy=file_hash(Path("rounds/r1/ppo/policy"))
    )
    write_json(taken_back_path("r1"), word.model_dump())
    assert champions(number=3) == [None, "r0", "r0"]
    write_text(Path("rounds/r1/ppo/policy/adapter.bin"), "trained anew")
    assert champions(number=3) == [None, "r0", "r1"]


def test_a_word_that_is_none() -> None:
    played("r0", 0.6)
    write_text(
        taken_back_path("r0"), json.dumps({"by": "Ada", "reason": "why", "policy": "the last"})
    )
    main(params_of("block"), "r0")
    with pytest.raises(
        BadInput,
        match=r"approvals/r0/taken_back.json: no rollback \(policy.*`rondo promote --rollback`",
    ):
        main(params_of("block"), "r1")


def test_files_that_are_not_the_champions() -> None:
    played("r0", 0.6)
    assert champions(number=2) == [None, "r0"]
    write_text(Path("rounds/r0/sft/model/model.bin"), "another")
    with pytest.raises(
        BadInput,
        match=r"rounds/r0/sft/model is not what became champion: run `dvc checkout rounds/r0/sft/model`",
    ):
        load_champion("r1")
