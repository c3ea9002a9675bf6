"""Two rounds of replay from disk: r0's policy ends with " Enjoy!" and its reward model likes that;
r1's has the opposite taste.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.core.params.data import rounds
from stages.lib.data.splits import dedupe_prompts
from stages.replay.__main__ import clean, last_third, main
from stages.replay.badcases import MiningPrompt, Report, add_user_rows

DATA = Path("rounds/r0/replay/data")


def metrics(round_: str) -> dict:
    return json.loads(Path(f"rounds/{round_}/replay/metrics.json").read_text())


def test_two_rounds(make_round):
    params = make_round("r0", 1.0)
    add_user_rows(
        "r0", [Report(prompt="The walk", response=" was wet.", better=" was brisk.", by="ada")]
    )
    main(params, "r0")
    zero = metrics("r0")
    files = {path.name: path.read_bytes() for path in DATA.iterdir()}
    main(params, "r0")
    assert files == {path.name: path.read_bytes() for path in DATA.iterdir()}

    # found in 3 of the 4 late rollouts, and liked by this reward model
    assert zero["exploits"] == [" Enjoy!"] and zero["leaked"] == 0
    assert zero["fooled_now"] > 0 and zero["fooled_before"] is None and zero["tried_again"] == 0
    badcases = {row["id"]: row for row in read_jsonl(DATA / "badcases.jsonl", "")}
    assert (
        len(badcases)
        == zero["badcases"]
        == sum(zero["causes"].values())
        <= params.replay.max_badcases + 1
    )
    # what a person has reported is a badcase, a pair and a demonstration of this round
    [told] = [row for row in badcases.values() if row["cause"] == "human"]
    assert (told["origin"], told["state"], told["kl"]) == ("ada", "replayed", None)
    pair = {
        "prompt": "The walk",
        "chosen": " was brisk.",
        "rejected": " was wet.",
        "source": "replay",
        "badcase": told["id"],
    }
    assert pair | {"id": f"replay-{told['id']}"} in read_jsonl(DATA / "pairs.jsonl", "")
    assert zero["causes"]["blind_spot"] >= 3
    enjoying = [row for row in badcases.values() if row["exploits"]]
    assert {row["origin"] for row in enjoying} == {4} and {row["round"] for row in enjoying} == {
        "r0"
    }

    # rows in prepare's formats, each traced to a badcase or an exploit, none from the evaluation
    # set
    exploits = {row["id"] for row in read_jsonl(DATA / "exploits.jsonl", "")}
    for name, keys in {
        "pairs": {"chosen", "rejected"},
        "sft": {"completion"},
        "prompts": set(),
    }.items():
        for row in read_jsonl(DATA / f"{name}.jsonl", ""):
            assert row.keys() == {"id", "prompt", "source", "badcase"} | keys
            assert row["source"] == "replay" and row["badcase"] in exploits | badcases.keys()
            assert row["prompt"].startswith("The ")
    against = [row for row in read_jsonl(DATA / "pairs.jsonl", "") if row["badcase"] in exploits]
    assert len(against) == params.replay.pairs_per_exploit

    params.replay.weight, params.replay.max_share = 2, 1.0
    once_each = {
        name: read_jsonl(DATA / f"{name}.jsonl", "") for name in ("pairs", "sft", "prompts")
    }
    main(params, "r0")
    for name, some in once_each.items():
        twice = Counter(row["id"] for row in read_jsonl(DATA / f"{name}.jsonl", ""))
        assert set(twice.values()) <= {2} and twice.keys() >= {row["id"] for row in some}

    make_round("r1", -1.0)
    main(params, "r1")
    one = metrics("r1")
    assert one["tried_again"] == zero["badcases"]
    assert one["repaired"] == sum(one["repaired_by_cause"].values())
    # what raised a rejected text's score lowers it now: fewer of them beat their chosen text
    assert one["fooled_before"] == zero["fooled_now"] > one["fooled_after"]
    carried = [
        row
        for row in read_jsonl(Path("rounds/r1/replay/data/badcases.jsonl"), "")
        if row["round"] == "r0"
    ]
    assert {row["id"] for row in carried} == badcases.keys()
    assert sum(row["state"] == "repaired" for row in carried) == one["repaired"]
    assert {tuple(attempt["round"] for attempt in row["tries"]) for row in carried} == {
        ("r0", "r1")
    }
    assert one["guarded"] == one["regressed"] == 0  # nothing was repaired before

    # a third round, which is the first that could break what the second has repaired
    make_round("r2", 1.0)
    params.rounds = rounds(3)
    main(params, "r2")
    two = metrics("r2")
    ledger = [
        row
        for row in read_jsonl(Path("rounds/r2/replay/data/badcases.jsonl"), "")
        if row["round"] == "r0"
    ]
    states = Counter(
        row["state"]
        for row in ledger
        if row["id"] in {case["id"] for case in carried if case["state"] == "repaired"}
    )
    assert (
        two["guarded"] == one["repaired"] == states["locked"] + states["regressed"]
        and two["regressed"] == states["regressed"]
    )


def test_an_evaluation_prompt_is_refused(make_round):
    params = make_round("r0", 1.0)
    path = Path("rounds/r0/prepare/data/prompts_train.jsonl")
    write_jsonl(path, [*read_jsonl(path, ""), {"id": "leak", "prompt": "our  MEETING"}])
    with pytest.raises(BadInput, match="leak is evaluation prompt q-Our meeting"):
        main(params, "r0")


def test_a_report_about_an_evaluation_prompt_is_refused(make_round):
    params = make_round("r0", 1.0)
    add_user_rows("r0", [Report(prompt="Our meeting", response=" was dull.", by="ada")])
    with pytest.raises(BadInput, match="is evaluation prompt q-Our meeting"):
        main(params, "r0")


def test_prompts_of_peoples_own_are_mined_too(make_round):
    params = make_round("r0", 1.0)
    params.replay.max_badcases = 64
    [wanted] = [MiningPrompt(prompt="The queue", by="ada")]
    add_user_rows("r0", [wanted, wanted])
    main(params, "r0")
    ids = {
        row["prompt_id"]
        for row in read_jsonl(DATA / "badcases.jsonl", "")
        if row["prompt"] == "The queue"
    }
    assert ids == {wanted.id}
    assert "The queue" in {row["prompt"] for row in read_jsonl(DATA / "prompts.jsonl", "")}


@pytest.mark.parametrize(
    ("prompt", "said"), [("our MEETING", "q-Our meeting"), ("The queue", "slices/mine.jsonl:2")]
)
def test_what_people_give_is_refused_where_nobody_may_train_on_it(make_round, prompt, said):
    params = make_round("r0", 1.0)
    write_jsonl(
        Path("slices/mine.jsonl"),
        [{"prompt": "Hello", "label": "safe"}, {"prompt": "The queue", "label": "unsafe"}],
    )
    add_user_rows(
        "r0", [MiningPrompt(prompt="The walk", by="ada"), MiningPrompt(prompt=prompt, by="ada")]
    )
    with pytest.raises(
        BadInput, match=rf"badcases/r0.jsonl:2: its prompt is evaluation prompt {said}"
    ):
        main(params, "r0")


def test_what_would_leak_in_the_next_round_is_left_out_and_counted():
    tale = "once upon a time there were two moons above a sea of glass"  # 13 words
    evaluation = {
        "sft_eval": [{"id": "e", "prompt": "Our meeting", "completion": f" began: {tale}."}]
    }
    told = {"id": "a", "prompt": "The walk", "completion": f", {tale}!"}
    other = {"id": "b", "prompt": "The walk", "completion": " was great."}
    pair = {"id": "c", "prompt": "The trip", "chosen": " was fine.", "rejected": f" {tale}"}
    made = {"pairs": [pair], "sft": [told, other], "prompts": [{"id": "d", "prompt": "The trip"}]}
    assert clean(made, evaluation, 0.9) == (
        {"pairs": [], "sft": [other], "prompts": made["prompts"]},
        2,
    )


def test_late_rollouts_and_prompts_once():
    assert [row["update"] for row in last_third([{"update": n} for n in range(1, 10)])] == [7, 8, 9]
    assert last_third([]) == []
    assert dedupe_prompts(
        [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "a", "id": 3}]
    ) == [
        {"prompt": "a", "id": 1},
        {"prompt": "b", "id": 2},
    ]


def test_a_policy_of_all_weights_is_mined_like_its_adapter(make_round, adapter_and_whole):
    params = make_round("r0", 1.0)

    def mined():
        main(params, "r0")
        return [
            (row["cause"], row["prompt"], row["response"], row["sft"])
            for row in read_jsonl(DATA / "badcases.jsonl", "")
        ]

    adapter, whole = adapter_and_whole("r0", mined)
    assert adapter == whole and adapter
