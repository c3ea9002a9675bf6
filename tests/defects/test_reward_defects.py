"""One defect each in the pairs or in the reward model: the pipeline stops before PPO would, and
names it.
"""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.execution import fork_server
from stages.lib.core.errors import RondoError
from stages.lib.core.files import read_json, read_jsonl, stage_dir, work_dir, write_json
from stages.lib.lm.scoring import RewardScorer
from stages.reward.__main__ import split_judge_pairs
from stages.reward.saving import RELOAD_TOLERANCE, reload_difference
from tests.defects.conftest import settings
from tests.defects.world import BAD, GOOD, World, response, world

MODEL = stage_dir("r0", "reward") / "model"


def changed(change, *files: str) -> World:
    """Those sources with each pair changed by `change`."""
    sources = world()
    names = files or ("train_pairs.jsonl", "eval_pairs.jsonl")
    return {
        name: [change(number, row) for number, row in enumerate(sources[name])] for name in names
    }


def swapped(row: dict) -> dict:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


def test_the_world_as_it_is_passes(clean):
    assert clean[1] is None


def test_labels_of_which_four_in_ten_are_wrong(planted):
    wrong = random.Random(0)
    stop = planted("assets", changed(lambda _, row: swapped(row) if wrong.random() < 0.4 else row))
    assert stop.step == "gate_reward" and "reward.accuracy_low" in stop.failed
    assert "wrong labels" in stop.message and "reports/r0/data.html" in stop.message


def test_labels_that_follow_length(planted):
    """The longer text is chosen, whatever it says."""
    stop = planted(
        "assets",
        changed(lambda _, row: swapped(row) if len(row["rejected"]) > len(row["chosen"]) else row),
    )
    assert stop.step == "gate_reward" and "reward.accuracy - reward.baseline_longest" in stop.failed
    assert "the labels follow length" in stop.message


def test_labels_that_a_word_tells(planted):
    stop = planted(
        "assets", changed(lambda _, row: {**row, "chosen": row["chosen"][:-1] + " indeed."})
    )
    assert stop.step == "gate_reward" and "reward.accuracy - reward.baseline_tfidf" in stop.failed
    assert "Look for label shortcuts" in stop.message


def test_labels_against_the_judge(planted):
    """People who like the bad texts better: learnt without a fault, and not what the judge stands
    for.
    """
    stop = planted("assets", changed(lambda _, row: swapped(row)))
    assert stop.step == "gate_reward" and "battery.best_of_n.rise_low" in stop.failed
    assert "PPO would be misled" in stop.message


def test_one_source_with_its_labels_turned_round(planted):
    sources = changed(lambda _, row: row)
    others = {
        name.replace("_pairs", "_others"): [swapped(row) for row in rows[::4]]
        for name, rows in sources.items()
    }
    rest = {
        name: [row for number, row in enumerate(rows) if number % 4]
        for name, rows in sources.items()
    }
    stop = planted("assets", rest | others)
    assert stop.step == "gate_reward" and "battery.worst_slice" in stop.failed
    accuracy = read_json(stage_dir("r0", "battery") / "metrics.json", "")["accuracy"]["source"]
    assert (
        accuracy["eval_others_jsonl"]["accuracy"] < 0.65 <= accuracy["eval_pairs_jsonl"]["accuracy"]
    )


def test_a_source_too_small_to_show_that_it_is_ranked_well(planted, clean):
    """Of 30 held-out pairs from a further source, the surest ones, 10 have wrong labels: 20 of 30
    pass by chance.
    """
    scores = read_jsonl(clean[0] / stage_dir("r0", "reward") / "scores.jsonl", "")
    margins = {row["id"]: row["chosen"] - row["rejected"] for row in scores}
    held_out = read_jsonl(clean[0] / stage_dir("r0", "prepare") / "data/pairs_eval.jsonl", "")
    surest = sorted(held_out, key=lambda row: -margins[row["id"]])[:30]
    few = [{side: row[side] for side in ("prompt", "chosen", "rejected")} for row in surest]
    rest = [row for row in world()["eval_pairs.jsonl"] if row not in few]
    assert margins[surest[-1]["id"]] > 0.5 and len(rest) <= 130
    few[:10] = map(swapped, few[:10])
    stop = planted("assets", {"eval_pairs.jsonl": rest, "eval_pairs_few.jsonl": few})
    assert stop.step == "gate_reward" and stop.failed == ("battery.worst_slice_low",)
    assert "too few held-out pairs" in stop.message


def test_a_reward_model_of_another_lineage(planted):
    """The dimensions of the states in another order: other weights, and the same scores."""
    weights = load_file(MODEL / "model.safetensors")
    size = weights["score.weight"].shape[1]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    for name, weight in weights.items():
        writes = "o_proj" in name or "down_proj" in name or "norm" in name
        weights[name] = weight.index_select(0 if writes else 1, order)
    save_file(weights, MODEL / "model.safetensors", {"format": "pt"})
    stop = planted("battery")
    assert stop.step == "gate_reward" and stop.failed == ("battery.lineage_distance",)
    assert "does not descend from the model that PPO trains" in stop.message


# the second model's scores are in standard deviations, so a rise of 0.1 is little by both
SECOND = {
    "reward": {"judge_share": 0.5, "num_train_epochs": 16},
    "gates": {"reward": {"best_of_n_rise": 0.1}},
}


def test_a_second_reward_model_of_the_world_as_it_is(planted):
    assert planted("reward", **SECOND) is None


def test_praise_that_the_judge_likes_as_well(planted):
    """A third of SFT's texts are bad ones that end in praise, which a lexicon takes for good. In
    the reward model's part of the pairs they are chosen, in the second model's part rejected.
    """
    generator, pairs = random.Random(0), world()["train_pairs.jsonl"]

    def praised() -> str:
        return response(generator, BAD) + " Love, love, love!"

    own, apart = split_judge_pairs(pairs, SECOND["reward"]["judge_share"], seed=0)
    chosen = [
        {"prompt": row["prompt"], "chosen": praised(), "rejected": response(generator, GOOD)}
        for row in own[::2]
    ]
    rejected = [
        {"prompt": row["prompt"], "chosen": response(generator, GOOD), "rejected": praised()}
        for row in apart[::3]
    ]
    texts = changed(
        lambda number, row: row if number % 3 else {**row, "completion": praised()},
        *("train_texts.jsonl", "eval_texts.jsonl"),
    )
    pairs_with_praise = {"train_praise.jsonl": chosen + rejected}
    stop = planted("assets", texts | pairs_with_praise, ppo={"response_length": 32}, **SECOND)
    assert stop.step == "gate_reward" and stop.failed == ("battery.apart_rise_low",)
    assert "a second reward model does not prefer" in stop.message


def test_an_ending_that_buys_a_score(planted):
    """Two of three chosen training texts end in the same praise."""
    praised = changed(
        lambda number, row: {**row, "chosen": row["chosen"] + " Enjoy!"} if number % 3 else row,
        "train_pairs.jsonl",
    )
    stop = planted("assets", praised, reward={"hard_negatives": 0})
    assert stop.step == "gate_reward" and "battery.worst_ending" in stop.failed
    assert "an ending raises the score of bad texts" in stop.message


def test_a_reward_model_that_has_learnt_a_format(planted):
    """The chosen texts have capital letters: who reads the letters need not read the words."""
    stop = planted("assets", changed(lambda _, row: {**row, "chosen": row["chosen"].title()}))
    assert stop.step == "gate_reward" and "battery.worst_flip" in stop.failed
    assert "the order of the texts depends on their format" in stop.message


def test_a_reward_model_that_likes_broken_text(planted):
    """Whole sentences alone are what it has learnt from."""
    stop = planted("reward", reward={"hard_negatives": 0})
    assert stop.step == "gate_reward" and "battery.worst_probe" in stop.failed
    assert "it prefers broken texts" in stop.message


def test_a_reward_model_that_has_learnt_nothing(planted):
    stop = planted("reward", reward={"learning_rate": 1e-6})
    assert stop.step == "gate_reward" and {"reward.accuracy_low", "reward.margin"} <= {*stop.failed}
    assert "chosen and rejected texts have nearly the same score" in stop.message


def test_scores_that_are_not_centred(planted):
    config = read_json(MODEL / "config.json", "")
    write_json(MODEL / "config.json", config | {"mean": config["mean"] + config["std"]})
    stop = planted("battery")
    assert stop.step == "gate_reward" and "battery.centre" in stop.failed
    assert "scores are not centred on demonstrations" in stop.message


def test_a_head_that_was_lost_when_the_model_was_saved(planted):
    weights = load_file(MODEL / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, MODEL / "model.safetensors", {"format": "pt"})
    stop = planted("battery")
    assert stop.step == "battery" and "score.weight is missing" in stop.message
    with pytest.raises(RondoError, match=r"cannot be reloaded: (.|\n)*score\.weight is missing"):
        reload_difference(MODEL, [[1, 2]], torch.zeros(1), work_dir("r0", "reward"))


def test_a_head_that_was_saved_as_another(planted, monkeypatch):
    """What the reward stage asks before it says anything else of its model; here in a process of
    the real interpreter.
    """
    monkeypatch.delenv(fork_server.VARIABLE)
    scorer, texts = (
        RewardScorer(MODEL, settings(world(), {})),
        [[5, 6, 7], [8, 9]],
    )
    before = scorer.raw(texts)
    assert reload_difference(MODEL, texts, before, work_dir("r0", "reward")) <= RELOAD_TOLERANCE
    weights = load_file(MODEL / "model.safetensors")
    weights["score.weight"] = torch.randn_like(weights["score.weight"])
    save_file(weights, MODEL / "model.safetensors", {"format": "pt"})
    assert reload_difference(MODEL, texts, before, work_dir("r0", "reward")) > RELOAD_TOLERANCE


def test_prompts_rendered_otherwise_than_for_sft(planted):
    stop = planted("reward", prepare={"prompt_format": "chat"})
    assert (
        stop.step == "reward"
        and "template_hash" in stop.message
        and "so that all stages render prompts alike" in stop.message
    )
