"""The reward stage: margins in training, the pairs of the judge, calibration, hard negatives."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from docs.bench.families import CHATS, tokenizer_of
from stages.assets.inputs import main as inputs
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import is_placeholder, write_jsonl
from stages.lib.core.params import check_params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.recorder import MetricLogger
from stages.lib.data.prompts import chat_template, encode
from stages.lib.lm.loading import MEMBERS, load_any_tokenizer, load_tokenizer
from stages.lib.lm.scoring import RewardScorer, reads_alike, set_calibration
from stages.reward.__main__ import main, split_judge_pairs, tokenizer_for
from stages.reward.fit import fit, training_pairs
from stages.reward.hard_negatives import SIGNS, SMILEYS, hard_negatives
from tests.paths import ROOT
from tests.tokenizers import add_token

ROWS = [{"margin": 2.0}, {}]


def test_a_row_without_a_margin_gets_zero_if_others_have_one() -> None:
    pairs = training_pairs(ROWS, [[1, 2, 3], [4]], [[5], [6, 7]])
    assert pairs == [
        {"chosen_ids": [1, 2, 3], "rejected_ids": [5], "length": 3, "margin": 2.0},
        {"chosen_ids": [4], "rejected_ids": [6, 7], "length": 2, "margin": 0.0},
    ]
    assert all("margin" not in pair for pair in training_pairs([{}, {}], [[1], [2]], [[3], [4]]))


@pytest.mark.parametrize("attention", ["grouped", "sdpa"])
def test_the_margin_is_in_the_loss(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """A head of zeros gives all texts the same score: the loss of a pair is log(1 + e^margin)."""
    monkeypatch.chdir(tmp_path)
    training = {
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "center_rewards_coefficient": None,
        "lora": {"r": 0},
    }
    model_params = {"dtype": "float32", "threads": 1, "attn_implementation": attention}
    params = check_params({"reward": training, "model": model_params}, "test")
    if attention == "grouped":
        import stages.lib.lm.attention  # noqa: F401  # registers "grouped"
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_folder, num_labels=1, dtype=torch.float32, attn_implementation=attention
    )
    torch.nn.init.zeros_(model.score.weight)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    recorder = MetricLogger("reward", "r0")
    pairs = training_pairs(ROWS, [[5, 6, 7], [8, 9]], [[5, 6], [8, 4]])
    fit(model, tokenizer, pairs, params, 0, recorder, continues=False)
    assert recorder.steps[0]["loss"] == pytest.approx(
        (math.log(1 + math.exp(2)) + math.log(2)) / 2, abs=1e-4
    )


def test_judge_pairs_share_no_prompt_with_others_and_do_not_change_in_later_rounds() -> None:
    rows = [{"prompt": f"p{number // 2}", "chosen": str(number)} for number in range(400)]
    reward_rows, judge_rows = split_judge_pairs(rows, 0.25, seed=0)
    assert len(reward_rows) + len(judge_rows) == 400
    assert not {row["prompt"] for row in reward_rows} & {row["prompt"] for row in judge_rows}
    # expected: 100; the standard deviation, with 200 prompts of two pairs each, is 12
    assert 70 <= len(judge_rows) <= 130
    later_rows = [{"prompt": "p0", "badcase": "b"}, {"prompt": "new"}, *rows]
    _, later_judge_rows = split_judge_pairs(later_rows, 0.25, seed=0)
    assert [row for row in later_judge_rows if row["prompt"] != "new"] == judge_rows
    assert split_judge_pairs(rows, 0.0, seed=0) == (rows, [])


def test_the_judge_is_trained_on_its_own_pairs(make_round, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    params.reward.max_steps, params.reward.per_device_train_batch_size = 2, 8
    main(params, "r0")
    folder = Path("rounds/r0/reward")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert is_placeholder(folder / "judge")
    assert (metrics["judge_pairs"], metrics["train_pairs"]) == (0, 54)
    params.reward.judge_share = 0.5
    main(params, "r0")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert not is_placeholder(folder / "judge")
    assert metrics["judge_pairs"] + metrics["train_pairs"] == 54 and metrics["judge_pairs"] > 0
    # two random heads of 64 weights have a cosine of 0 +- 0.13; of two equal ones it is still 0.99
    # after these steps
    judge, model = (
        load_file(folder / name / "model.safetensors")["score.weight"].flatten()
        for name in ("judge", "model")
    )
    assert abs(torch.cosine_similarity(judge, model, dim=0)) < 0.5


def test_scores_are_centred_on_a_sample_of_held_out_demonstrations(
    make_round, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 of them, of two sources, one after the other."""
    params = make_round("r0", 1.0)
    params.reward.max_steps, params.reward.per_device_train_batch_size = 2, 8
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    sources = [("Our meeting", " was great."), ("Our concert", " was a sad and dull affair.")]
    rows = [
        {"id": f"e-{number}", "prompt": f"{prompt} {number}", "completion": completion}
        for (prompt, completion), size in zip(sources, (260, 140), strict=True)
        for number in range(size)
    ]
    write_jsonl(Path("rounds/r0/prepare/data/sft_eval.jsonl"), rows)
    main(params, "r0")
    model = Path("rounds/r0/reward/model")
    scorer = RewardScorer(model, params)
    scores = torch.tensor(
        scorer([row["prompt"] for row in rows], [row["completion"] for row in rows])
    )
    # the mean of all is about that of a random sample of 256 (its standard error is 0.04), but not
    # that of the first 256, which are of the first source
    assert scores.mean().item() == pytest.approx(0.0, abs=0.12)
    assert scores.std().item() == pytest.approx(1.0, abs=0.12)
    assert abs(scores[:256].mean().item()) > 0.2


def test_calibration_is_the_mean_and_the_standard_deviation_of_a_sample() -> None:
    model = set_calibration(SimpleNamespace(config=SimpleNamespace()), torch.tensor([1.0, 3.0]))
    assert (model.config.mean, model.config.std) == (2.0, pytest.approx(math.sqrt(2)))


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_scores_that_are_equal_or_not_finite_are_a_diverged_model(scores: list[float]) -> None:
    model = SimpleNamespace(config=SimpleNamespace())
    with pytest.raises(RondoError, match=r"diverged: .* 2 held-out .*; lower reward\.learning"):
        set_calibration(model, torch.tensor(scores))


PAIRS = [
    {
        "id": f"p{n}",
        "prompt": "It",
        "chosen": f" is a fine day, number {n}!",
        "rejected": f" was a bad day, number {n}.",
        "source": "people",
    }
    for n in range(60)
]


def test_kinds_come_in_turn_and_the_chosen_text_stays():
    rows = hard_negatives(PAIRS, 0.55, seed=1)
    assert len(rows) == 33
    kinds = Counter(row["id"].split("-")[1] for row in rows)
    assert kinds == {
        "bought_word": 12,
        "decorated": 6,
        "borrowed_ending": 3,
        "word_salad": 3,
        "repeated_word": 3,
        "truncated": 3,
        "empty": 3,
    }
    for row in rows:
        pair_id, kind = row["id"].split("-")
        pair = PAIRS[int(pair_id[1:])]
        assert (row["prompt"], row["chosen"]) == ("It", pair["chosen"])
        assert row["source"] == "hard_negative"
        rejected, words = row["rejected"], row["rejected"].split()
        starts_as_before = rejected.startswith(pair["rejected"])
        added = rejected.removeprefix(pair["rejected"])
        expected = {
            # these two words are in chosen texts alone
            "bought_word": starts_as_before and added.strip(" .!").casefold() in ("is", "fine"),
            "decorated": starts_as_before and added in {f" {sign}" for sign in (*SMILEYS, *SIGNS)},
            "borrowed_ending": starts_as_before and rejected.endswith("!"),
            "word_salad": sorted(words) == sorted(row["chosen"].split())
            and rejected != row["chosen"],
            "repeated_word": rejected in (" fine" * 6, " is" * 6),
            "truncated": rejected == " is a fine",
            "empty": rejected == "",
        }
        assert expected[kind], row


def test_equal_seeds_give_equal_rows_and_no_pairs_give_none():
    rows = hard_negatives(PAIRS, 0.2, seed=3)
    assert rows == hard_negatives(PAIRS, 0.2, seed=3) != hard_negatives(PAIRS, 0.2, seed=4)
    assert hard_negatives(PAIRS, 0.0, seed=0) == [] == hard_negatives([], 0.5, seed=0)


def test_a_kind_that_changes_nothing_gives_no_row():
    no_word = [{"id": "a", "prompt": "It", "chosen": "!", "rejected": "?"}] * 11
    assert {row["id"] for row in hard_negatives(no_word, 1.0, seed=0)} == {
        "a-borrowed_ending",
        "a-decorated",
        "a-truncated",
        "a-empty",
    }


CHAT = check_params({"prepare": {"prompt_format": "chat"}, "ppo": {"critic": "policy"}}, "test")
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder `mine` of a reward model, with a family's tokenizer and no weights."""

    def write(family: str, **config: float) -> Path:
        folder = tmp_path / "mine"
        tokenizer_of(family).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize("family", CHATS)
def test_a_given_model_reads_the_conversation_as_its_template_writes_it(
    write_tokenizer: Callable[..., Path], tiny_folder: Path, family: str
) -> None:
    """With its thoughts, and to its end: Qwen's ends with a line break, where TRL has trained it to
    be read.
    """
    folder = write_tokenizer(family)
    tokenizer_for(folder, load_tokenizer(tiny_folder), CHAT).save_pretrained(folder)
    tokenizer = load_any_tokenizer(folder)
    prompt, response = encode(tokenizer, TALK[:1], "Hello.", PromptFormat.chat)
    template = chat_template(tokenizer)
    whole = tokenizer.apply_chat_template(TALK, chat_template=template, return_dict=False)
    assert prompt + response == whole


def test_a_model_of_a_reward_stage_is_read_at_eos_as_it_was_trained(
    write_tokenizer: Callable[..., Path], tiny_folder: Path
) -> None:
    base = load_tokenizer(tiny_folder)
    assert not reads_alike(tokenizer_for(write_tokenizer("qwen2"), base, CHAT), base)
    assert tokenizer_for(write_tokenizer("qwen2", mean=0.0, std=1.0), base, CHAT) is base
    assert tokenizer_for(write_tokenizer("qwen2"), base, check_params({}, "test")) is base


def test_a_reward_or_judge_of_others_reads_whole_conversations(make_round) -> None:
    make_round("r0", 1.0)
    config = Path("rounds/r0/reward/model/config.json")
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: values[key] for key in values.keys() - {"mean", "std"}}))
    scorer = RewardScorer(config.parent, CHAT)
    whole = scorer.tokenizer.apply_chat_template(TALK, return_dict=False)
    assert scorer.encode([TALK[:1]], ["Hello."]) == [whole]


def test_a_template_without_the_assistants_text_is_refused(
    write_tokenizer: Callable[..., Path], tiny_folder: Path
) -> None:
    for template, reason in (
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{{ raise_exception('no') }}", "cannot render"),
    ):
        folder = write_tokenizer("qwen2")
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(BadInput, match=reason):
            tokenizer_for(folder, load_tokenizer(tiny_folder), CHAT)


def test_an_adapter_or_an_ensemble_is_no_given_model(tmp_path: Path, tiny_folder: Path) -> None:
    base = load_tokenizer(tiny_folder)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"reward\.model .*: an adapter: merge it"):
        tokenizer_for(tmp_path, base, CHAT)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / MEMBERS).mkdir()
    with pytest.raises(BadInput, match=r"reward\.model .*: an ensemble: name one member"):
        tokenizer_for(tmp_path, base, CHAT)


def test_a_given_reward_model_is_calibrated_and_measured_and_none_is_trained(
    make_round, to_hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = make_round("r0", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copytree("rounds/r0/reward/model", "mine")
    config = json.loads(Path("mine/config.json").read_text())
    Path("mine/config.json").write_text(json.dumps(config | {"mean": 40.0, "std": 3.0}))
    params.reward.model = "mine"
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    inputs(params, "r0")
    main(params, "r0")
    folder = Path("rounds/r0/reward")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["train_pairs"], metrics["hard_negatives"], metrics["loss"]) == (0, 0, None)
    assert metrics["score_mean"] != 40.0 and metrics["baseline_tfidf"] > 0.5
    weights = [load_file(path / "model.safetensors") for path in (Path("mine"), folder / "model")]
    torch.testing.assert_close(*weights)
    assert json.loads((folder / "manifest.json").read_text())["started_from"] == "mine"

    shutil.copytree("mine", "copy")
    params.reward.model = to_hub("copy")
    inputs(params, "r0")
    main(params, "r0")
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["started_from"] == params.reward.model == "org/copy@" + "0123456789" * 4

    params.reward.model = "mine"
    inputs(params, "r0")
    add_token(Path("mine"))
    with pytest.raises(BadInput, match=r"mine/tokenizer\.json changed after the run began"):
        main(params, "r0")
    inputs(params, "r0")
    with pytest.raises(BadInput, match=r"reward\.model mine: its tokens are not those of"):
        main(params, "r0")
