"""Rounds of replay from disk.

r0's policy ends texts with " Enjoy!", which its reward model likes; r1's reward model has the
opposite preference.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, write_jsonl
from stages.lib.core.params.data import rounds
from stages.lib.data.rollouts import RolloutLog
from stages.lib.data.splits import shuffled
from stages.replay import __main__ as replay
from stages.replay.__main__ import main
from stages.replay.badcases import MiningPrompt, Report, add_user_rows
from stages.replay.inputs import read_inputs
from stages.replay.sampler import Sampler
from stages.replay.training_rows import demonstrations_of

DATA = Path("rounds/r0/replay/data")


def read_metrics(round_: str) -> dict:
    return json.loads(Path(f"rounds/{round_}/replay/metrics.json").read_text())


def r0_badcases(round_: str) -> list[dict]:
    """The badcases of r0 in a round's ledger."""
    rows = read_jsonl(Path(f"rounds/{round_}/replay/data/badcases.jsonl"), "")
    return [row for row in rows if row["round"] == "r0"]


def test_three_rounds(make_round):
    params = make_round("r0", 1.0)
    report = Report(prompt="The walk", response=" was wet.", better=" was brisk.", by="ada")
    add_user_rows("r0", [report])
    main(params, "r0")
    r0 = read_metrics("r0")
    files = {path.name: path.read_bytes() for path in DATA.iterdir()}
    main(params, "r0")
    assert files == {path.name: path.read_bytes() for path in DATA.iterdir()}
    badcases = {row["id"]: row for row in read_jsonl(DATA / "badcases.jsonl", "")}
    check_badcases(r0, badcases, params.replay.max_badcases)
    check_training_rows(set(badcases), params.replay.pairs_per_exploit)

    params.replay.weight, params.replay.max_share = 2, 1.0
    names = ("pairs", "sft", "prompts")
    once = {name: read_jsonl(DATA / f"{name}.jsonl", "") for name in names}
    main(params, "r0")
    for name, rows in once.items():
        twice = Counter(row["id"] for row in read_jsonl(DATA / f"{name}.jsonl", ""))
        assert set(twice.values()) <= {2} and twice.keys() >= {row["id"] for row in rows}

    make_round("r1", -1.0)
    main(params, "r1")
    r1 = read_metrics("r1")
    assert r1["retested"] == r0["badcases"]
    assert r1["repaired"] == sum(r1["repaired_by_cause"].values())
    # r1's reward model lowers the score of a text for the ending that r0's raised it for: fewer
    # rejected texts beat their chosen text
    assert r1["reversed_before"] == r0["reversed_now"] > r1["reversed_after"]
    carried = r0_badcases("r1")
    repaired = {row["id"] for row in carried if row["state"] == "repaired"}
    assert {row["id"] for row in carried} == badcases.keys()
    assert len(repaired) == r1["repaired"]
    retest_rounds = {tuple(retest["round"] for retest in row["tries"]) for row in carried}
    assert retest_rounds == {("r0", "r1")}
    assert r1["guarded"] == r1["regressed"] == 0  # nothing was repaired before

    # the third round is the first that can break what the second has repaired
    make_round("r2", 1.0)
    params.rounds = rounds(3)
    main(params, "r2")
    r2 = read_metrics("r2")
    states = Counter(row["state"] for row in r0_badcases("r2") if row["id"] in repaired)
    assert r2["guarded"] == r1["repaired"] == states["locked"] + states["regressed"]
    assert r2["regressed"] == states["regressed"]


def check_badcases(metrics: dict, badcases: dict[str, dict], max_badcases: int) -> None:
    """r0's badcases: mined ones, and the reported one."""
    # the ending is in 3 of the 4 late rollouts, and this reward model likes it
    assert metrics["exploits"] == [" Enjoy!"] and metrics["leaked"] == 0
    assert metrics["reversed_now"] > 0 and metrics["reversed_before"] is None
    assert metrics["retested"] == 0
    assert len(badcases) == metrics["badcases"] == sum(metrics["causes"].values())
    assert len(badcases) <= max_badcases + 1
    # a reported response is a badcase, a pair and a demonstration of this round
    [reported] = [row for row in badcases.values() if row["cause"] == "human"]
    assert (reported["origin"], reported["state"], reported["kl"]) == ("ada", "replayed", None)
    pair = {
        "id": f"replay-{reported['id']}",
        "prompt": "The walk",
        "chosen": " was brisk.",
        "rejected": " was wet.",
        "source": "replay",
        "badcase": reported["id"],
    }
    assert pair in read_jsonl(DATA / "pairs.jsonl", "")
    assert metrics["causes"]["blind_spot"] >= 3
    with_exploit = [row for row in badcases.values() if row["exploits"]]
    assert {(row["origin"], row["round"]) for row in with_exploit} == {(4, "r0")}


def check_training_rows(badcases: set[str], pairs_per_exploit: int) -> None:
    """Rows in prepare's formats, each of a badcase or an exploit, none from the evaluation set."""
    exploits = {row["id"] for row in read_jsonl(DATA / "exploits.jsonl", "")}
    keys_by_file = {"pairs": {"chosen", "rejected"}, "sft": {"completion"}, "prompts": set()}
    for name, keys in keys_by_file.items():
        for row in read_jsonl(DATA / f"{name}.jsonl", ""):
            assert row.keys() == {"id", "prompt", "source", "badcase"} | keys
            assert row["source"] == "replay" and row["badcase"] in exploits | badcases
            assert row["prompt"].startswith("The ")
    pairs = read_jsonl(DATA / "pairs.jsonl", "")
    assert sum(row["badcase"] in exploits for row in pairs) == pairs_per_exploit


def test_pairs_of_the_policy_come_last(make_round, monkeypatch):
    params = make_round("r0", 1.0)
    params.evaluate.judges, params.replay.max_share = ["lexicon"], 1.0
    inputs(params, "r0")
    # an early update, from whose responses no badcases are mined. The late ones of the fixture are
    # " was sad.", and " was a match? Enjoy!", whose ending is an exploit
    row = {"update": 2, "score": 20.0, "reward": 20.0, "judge_score": 0.5, "kl": 3.0, "length": 6}
    early = {"The dinner": " was glad.", "The party": " was a good match!"}
    RolloutLog(Path("rounds/r0/ppo/rollouts"), (2, 0)).append(
        {**row, "id": f"p-{prompt}", "prompt": prompt, "response": text, "finish_reason": "stop"}
        for prompt, text in early.items()
    )
    # 60 responses per prompt, of which a few end
    params.replay.policy_pairs, params.replay.best_of = 5, 60
    calls, sample = [], Sampler.policy_texts
    compared, make_pairs = [], replay.policy_pairs

    def policy_texts(self, prompts, seed):
        calls.append((prompts, seed, sample(self, prompts, seed)))
        return calls[-1][2]

    def policy_pairs(prompts, responses, *more):
        compared.extend(responses)
        return make_pairs(prompts, responses, *more)

    monkeypatch.setattr(Sampler, "policy_texts", policy_texts)
    monkeypatch.setattr(replay, "policy_pairs", policy_pairs)
    main(params, "r0")
    # of the first five of the shuffled training prompts
    drawn = shuffled(read_inputs("r0", 2).prompts, params.seed)[:5]
    *_, (prompts, seed, fresh) = calls
    assert prompts == [row["prompt"] for row in drawn for _ in range(60)]
    assert seed == params.seed + 4
    ended = [response.text for response in fresh if response.ended]
    written = [response for texts in compared for response in texts if response in ended]
    assert written == list(dict.fromkeys(ended)) and len(ended) > 1
    pairs, metrics = read_jsonl(DATA / "pairs.jsonl", ""), read_metrics("r0")
    own = [row for row in pairs if row["id"].startswith("policy-")]
    assert 0 < metrics["policy_pairs"] == len(own) < len(pairs) and pairs[-len(own) :] == own
    texts = {row["prompt"]: (row["chosen"], row["rejected"]) for row in own}
    assert texts["The dinner"] == (" was glad.", " was sad.")
    assert texts["The party"] == (" was a good match!", " was a match? Enjoy!")


def test_rows_of_earlier_rounds_follow_the_new_ones(make_round):
    params = make_round("r0", 1.0)
    params.replay.max_share, params.replay.max_badcases = 1.0, 2
    report = Report(prompt="The walk", response=" was wet.", better=" was brisk.", by="ada")
    add_user_rows("r0", [report])
    main(params, "r0")
    new = {name: read_jsonl(DATA / f"{name}.jsonl", "") for name in ("pairs", "sft", "prompts")}
    assert read_metrics("r0")["earlier_pairs"] == 0 and all(new.values())

    failed = {one["prompt"] for one in new["prompts"]}
    unused = next(
        one["prompt"] for one in read_inputs("r0", 2).prompts if one["prompt"] not in failed
    )

    # the rows of an earlier round; prepare has added them to the data's own, twice if replay.weight
    # is 2. The texts of one pair are those of a new row, whose exploit was found again
    row = {"id": "old", "prompt": "The trip", "source": "replay", "badcase": "b"}
    texts = {"chosen": " was fine.", "rejected": " was dull."}
    old = {
        "pairs": [row | texts, new["pairs"][0] | {"id": "found before"}],
        "sft": [row | {"completion": " was fine."}],
        "prompts": [row | {"prompt": unused}],
    }
    for name, rows in old.items():
        path = Path(f"rounds/r0/prepare/data/{name}_train.jsonl")
        write_jsonl(path, [*read_jsonl(path, ""), *rows, *rows])
    main(params, "r0")
    assert read_jsonl(DATA / "pairs.jsonl", "") == [*new["pairs"], old["pairs"][0]]
    assert read_jsonl(DATA / "sft.jsonl", "") == [*new["sft"], *old["sft"]]
    assert read_jsonl(DATA / "prompts.jsonl", "") == [*new["prompts"], *old["prompts"]]
    assert read_metrics("r0")["earlier_pairs"] == 1


REVISED = Path("rounds/r0/annotate/revised.jsonl")


def revised(prompt: str, text: str) -> dict:
    return {
        "id": f"p-{prompt}",
        "prompt": prompt,
        "response": " was dull.",
        "principle": "Be kind.",
        "critique": "It is unkind.",
        "revision": text,
    }


def test_revised_responses_are_demonstrations_after_those_of_badcases(make_round):
    params = make_round("r0", 1.0)
    params.replay.max_share = 1.0
    report = Report(prompt="The walk", response=" was wet.", better=" was brisk.", by="ada")
    add_user_rows("r0", [report])
    main(params, "r0")
    before = {name: read_jsonl(DATA / f"{name}.jsonl", "") for name in ("pairs", "sft", "prompts")}
    assert before["sft"] and "revised" not in read_metrics("r0")

    # the third has the text of a held-out demonstration with its prompt, in 13 words
    tale = " was great, and once upon a time there were two moons above a sea"
    path = Path("rounds/r0/prepare/data/sft_eval.jsonl")
    held_out = {"id": "e", "prompt": "Our day", "completion": tale}
    write_jsonl(path, [*read_jsonl(path, ""), held_out])
    rows = [
        revised("The walk", " was kind."),
        revised("The trip", " was gentle."),
        revised("The match", tale),
    ]
    write_jsonl(REVISED, rows)
    main(params, "r0")
    added = [
        {
            "id": f"revised-r0-p-{prompt}",
            "prompt": prompt,
            "source": "revision",
            "badcase": f"revised-r0-p-{prompt}",
            "completion": text,
        }
        for prompt, text in (("The walk", " was kind."), ("The trip", " was gentle."))
    ]
    assert read_jsonl(DATA / "sft.jsonl", "") == [*before["sft"], *added]
    assert read_jsonl(DATA / "pairs.jsonl", "") == before["pairs"]
    assert read_jsonl(DATA / "prompts.jsonl", "") == before["prompts"]
    metrics = read_metrics("r0")
    assert (metrics["revised"], metrics["leaked"]) == (2, 1)
    assert metrics["demonstrations"] == len(before["sft"]) + 2

    # room for one demonstration more than those of badcases: 18 are from the data
    params.replay.max_share = (len(before["sft"]) + 1.5) / (18 + len(before["sft"]) + 1.5)
    main(params, "r0")
    assert read_jsonl(DATA / "sft.jsonl", "") == [*before["sft"], added[0]]
    assert read_metrics("r0")["revised"] == 1


def test_revised_responses_are_no_rows_of_people(make_round):
    """The next round's room for replayed rows is a share of the 18 demonstrations of the data."""
    make_round("r0", 1.0)
    path = Path("rounds/r0/prepare/data/sft_train.jsonl")
    [row] = demonstrations_of([revised("The walk", " was kind.")], "r0")
    write_jsonl(path, [*read_jsonl(path, ""), row])
    assert read_inputs("r0", 2).human["sft"] == 18


def test_evaluation_prompts_are_refused(make_round):
    """Of training rows, revised responses and reports, whose rows would be trained on."""
    params = make_round("r0", 1.0)
    prompts = Path("rounds/r0/prepare/data/prompts_train.jsonl")
    add_user_rows("r0", [Report(prompt="Our meeting", response=" was dull.", by="ada")])
    with pytest.raises(BadInput, match="is evaluation prompt q-Our meeting"):
        main(params, "r0")
    write_jsonl(REVISED, [revised("our  MEETING", " was kind.")])
    with pytest.raises(BadInput, match="p-our  MEETING is evaluation prompt q-Our meeting"):
        main(params, "r0")
    write_jsonl(prompts, [*read_jsonl(prompts, ""), {"id": "leak", "prompt": "our  MEETING"}])
    with pytest.raises(BadInput, match="leak is evaluation prompt q-Our meeting"):
        main(params, "r0")
    REVISED.unlink()
    with pytest.raises(BadInput, match=r"revised\.jsonl is missing: run `dvc repro annotate@r0`"):
        main(params, "r0")


def test_prompts_that_people_add_are_mined_too(make_round):
    params = make_round("r0", 1.0)
    params.replay.max_badcases = 64
    added = MiningPrompt(prompt="The queue", by="ada")
    add_user_rows("r0", [added, added])
    main(params, "r0")
    badcases = read_jsonl(DATA / "badcases.jsonl", "")
    assert {row["prompt_id"] for row in badcases if row["prompt"] == "The queue"} == {added.id}
    assert "The queue" in {row["prompt"] for row in read_jsonl(DATA / "prompts.jsonl", "")}


@pytest.mark.parametrize(
    ("prompt", "name"), [("our MEETING", "q-Our meeting"), ("The queue", "slices/mine.jsonl:2")]
)
def test_added_prompts_that_may_not_be_trained_on_are_refused(make_round, prompt, name):
    params = make_round("r0", 1.0)
    safe = {"prompt": "Hello", "label": "safe"}
    unsafe = {"prompt": "The queue", "label": "unsafe"}
    write_jsonl(Path("slices/mine.jsonl"), [safe, unsafe])
    prompts = [MiningPrompt(prompt=text, by="ada") for text in ("The walk", prompt)]
    add_user_rows("r0", prompts)
    message = rf"badcases/r0.jsonl:2: its prompt is evaluation prompt {name}"
    with pytest.raises(BadInput, match=message):
        main(params, "r0")


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


def test_each_fresh_response_is_compared_with_sfts_response_to_its_prompt(make_round):
    params = make_round("r0", 1.0)
    main(params, "r0")
    prompts = [row["prompt"] for row in shuffled(read_inputs("r0", 2).prompts, params.seed)]
    texts = [response.text for response in Sampler(params, "r0").sft(prompts, params.seed)]
    by_prompt = dict(zip(prompts, texts, strict=True))
    rows = [row for row in read_jsonl(DATA / "badcases.jsonl", "") if row["origin"] == "fresh"]
    assert len({row["sft"] for row in rows}) > 1
    assert [row["sft"] for row in rows] == [by_prompt[row["prompt"]] for row in rows]
