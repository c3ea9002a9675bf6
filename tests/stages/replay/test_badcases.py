"""States of a badcase, and what people add."""

import json
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_jsonl
from stages.replay.badcases import (
    Badcase,
    Cause,
    MiningPrompt,
    Report,
    Retest,
    State,
    add_user_rows,
    badcase_id,
    ledger_path,
    read_ledger,
    read_user_rows,
)

CASE = {"id": "a1", "round": "r0", "cause": "no_eos", "state": "replayed", "origin": 4}
CASE |= {"prompt_id": "p", "prompt": "It", "response": " was", "score": 1.0}
CASE |= {"sentiment": 0.5, "sentiment_plain": 0.5, "repetition": 0.0}
NONE, SOME, ALL = (Retest(round="r9", fired=fired, of=4, ranked=True) for fired in (0, 2, 4))
WRONG = Retest(round="r9", fired=0, of=4, ranked=False)


def test_ids_are_stable_and_differ_by_cause():
    # sha256 of '["The dinner", " was fine.", "no_eos"]', first 12 digits, by sha256sum
    assert badcase_id("The dinner", " was fine.", Cause.no_eos) == "04789d43f4da"
    assert badcase_id("The dinner", " was fine.", Cause.repetition) != badcase_id(
        "The dinner", " was fine.", Cause.no_eos
    )


@pytest.mark.parametrize(
    ("state", "retest", "becomes"),
    [
        ("replayed", NONE, "repaired"),
        ("replayed", SOME, "open"),
        ("replayed", ALL, "open"),
        ("replayed", WRONG, "open"),
        ("open", NONE, "repaired"),
        ("repaired", NONE, "locked"),
        ("repaired", SOME, "locked"),  # some fail by chance
        ("repaired", ALL, "regressed"),
        ("repaired", WRONG, "regressed"),
        ("locked", SOME, "locked"),
        ("locked", ALL, "regressed"),
        ("regressed", NONE, "repaired"),
        ("regressed", SOME, "regressed"),
    ],
)
def test_the_state_after_a_retest(state, retest, becomes):
    case = Badcase.model_validate(CASE | {"state": state}).with_retest(retest)
    assert case.state is State(becomes) and case.tries == [retest]
    assert case.guarded == (becomes in ("repaired", "locked"))


def test_a_retest_by_its_own_round_measures_chance_only():
    case = Badcase.model_validate(CASE)
    passed, failed = (
        case.with_retest(retest.model_copy(update={"round": "r0"})) for retest in (NONE, SOME)
    )
    assert (passed.state, passed.by_chance) == (State.replayed, True)
    assert (failed.state, failed.by_chance, case.by_chance) == (State.replayed, False, False)
    assert not case.with_retest(NONE).by_chance  # of another round
    # what a later round finds does not change it
    assert passed.with_retest(ALL).by_chance and not failed.with_retest(NONE).by_chance


def test_an_invalid_ledger_names_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"badcases\.jsonl is missing: run `dvc repro replay@r0`"):
        read_ledger("r0")
    write_jsonl(ledger_path("r0"), [CASE, CASE | {"cause": "boredom"}])
    with pytest.raises(
        BadInput,
        match=r"badcases\.jsonl:2: no badcase \(cause: Input should be .*run `dvc repro replay@r0`",
    ):
        read_ledger("r0")


def test_what_people_add_is_kept_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_user_rows("r1") == []
    one, other = (
        Report(prompt="It", response=text, note="dull", by="ada") for text in (" was", " is")
    )
    prompt = MiningPrompt(prompt="It", by="bob")
    assert add_user_rows("r1", [one, one, prompt]) == 2
    Path(f"badcases/.r1.jsonl.{'0' * 32}.tmp").write_text("half of i")  # of a killed process
    assert add_user_rows("r1", [one, other, prompt]) == 1
    assert read_user_rows("r1") == [
        ("badcases/r1.jsonl:1", one),
        ("badcases/r1.jsonl:2", prompt),
        ("badcases/r1.jsonl:3", other),
    ]
    assert list(Path("badcases").iterdir()) == [Path("badcases/r1.jsonl")]
    rows = [json.loads(line) for line in Path("badcases/r1.jsonl").read_text().splitlines()]
    assert rows[1:] == [
        {"prompt": "It", "by": "bob"},
        {"prompt": "It", "response": " is", "note": "dull", "by": "ada"},
    ]
    write_jsonl(Path("badcases/r1.jsonl"), [*rows, {"response": " was", "by": "bob"}])
    with pytest.raises(
        BadInput, match=r"badcases/r1\.jsonl:4: no report \(prompt: Field required\); fix the line"
    ):
        read_user_rows("r1")
    Path("badcases/r1.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"badcases/r1\.jsonl:1: .*fix the line"):
        read_user_rows("r1")
    write_jsonl(Path("badcases/r1.jsonl"), [*rows, {"prompt": "It", "note": "why"}])
    message = r"badcases/r1\.jsonl:4: no mining prompt \(by: Field required\); fix the line"
    with pytest.raises(BadInput, match=message):
        read_user_rows("r1")
