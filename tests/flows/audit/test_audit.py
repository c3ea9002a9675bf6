"""Audits of small models, functions, servers and judges whose faults are known."""

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import BertProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from flows.audit.inputs import read_pairs
from flows.audit.measure import that_fit, word_accuracy
from flows.audit.subjects import Classifier, find_subject
from flows.audit.verdict import FAILED, LINES, NOT_MEASURED, PASSED, WORDS
from flows.cli import exit_code
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.data import SourceParams

GOOD = ("wonderful", "great", "lovely", "superb", "charming")
BAD = ("awful", "sad", "dull", "dreadful", "grim")
THINGS = ("dinner", "garden", "song", "film", "walk", "town", "hotel", "train", "book", "party")
FUNCTIONS = rf'''
"""Scoring functions with known faults."""
import re

GOOD, BAD = {GOOD!r}, {BAD!r}

def right(prompts, texts):
    """Good words less bad words; texts in another form lose."""
    scores = []
    for text in texts:
        words = text.lower().strip(' ".').split()
        score = sum(word in GOOD for word in words) - sum(word in BAD for word in words)
        broken = not re.fullmatch(r"\W*was \w+( \w+)? and( \w+)? \w+\W*", text.lower())
        scores.append(float(score - 9 * broken))
    return scores

def swapped(prompts, texts):
    return [-score for score in right(prompts, texts)]

def longest(prompts, texts):
    return [float(len(text)) for text in texts]

def shortest(prompts, texts):
    return [-float(len(text)) for text in texts]

def fond_of_bangs(prompts, texts):
    return [score + 9.0 * text.endswith("!") for score, text in zip(right(prompts, texts), texts)]

def broken(prompts, texts):
    return [float("nan")] * len(texts)

def needs_labels(prompts, texts, label):
    return [0.0] * len(texts)

count = iter(range(10 ** 9))

def random_each_time(prompts, texts):
    return [float(hash((next(count), text)) % 97) for text in texts]
'''


def pair(number: int) -> dict[str, str]:
    draw = random.Random(number)
    thing, length = draw.choice(THINGS), draw.randrange(3)
    texts = {}
    for side, kind in (("chosen", GOOD), ("rejected", BAD)):
        first, second = draw.sample(kind, 2)
        texts[side] = f" was {first} and {second}."
    # length goes with the label in a third of the pairs, and against it in another
    for side in [["chosen"], ["rejected"], []][length]:
        texts[side] = texts[side].replace(" and ", " indeed and rather ")
    return {"prompt": f"The {thing} {number}", **texts, "topic": thing}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without a project: pairs.jsonl and functions.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    lines = (json.dumps(pair(number)) for number in range(120))
    Path("pairs.jsonl").write_text("\n".join(lines))
    Path("functions.py").write_text(FUNCTIONS)
    return tmp_path


def audit(named: str, *options: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code, and the lines by metric."""
    code = exit_code(["audit-reward", named, "--pairs", "pairs.jsonl", *options])
    lines = json.loads(Path("audit/audit.json").read_text())["lines"]
    return code, {line["metric"]: line for line in lines}


def outcomes(lines: dict[str, dict[str, object]], outcome: str) -> set[str]:
    return {metric for metric, line in lines.items() if line["outcome"] == outcome}


LENGTH_LEAD = "reward.accuracy - reward.baseline_longest"
ACCURACY, WORD_LEAD = "reward.accuracy_low", "reward.accuracy - reward.baseline_tfidf"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("function", "failed", "not_failed"),
    [
        ("right", {WORD_LEAD}, {ACCURACY, LENGTH_LEAD, "battery.worst_probe"}),
        ("swapped", {ACCURACY, "battery.worst_slice", "battery.worst_probe"}, set()),
        (
            "longest",
            {ACCURACY, LENGTH_LEAD, "battery.length_correlation_partial", "battery.worst_ending"},
            {"audit.repeat_difference"},
        ),
        ("fond_of_bangs", {WORD_LEAD, "battery.worst_ending"}, {ACCURACY, "battery.worst_flip"}),
        ("random_each_time", {"audit.repeat_difference", ACCURACY}, set()),
    ],
)
def test_a_known_fault_fails_its_line(
    function: str, failed: set[str], not_failed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = audit(f"functions:{function}")
    assert code == 3 and failed <= outcomes(lines, FAILED)
    assert not_failed <= outcomes(lines, PASSED)
    assert outcomes(lines, NOT_MEASURED) >= {"reward.ece", "battery.drift", "battery.judge_lead"}
    printed = capsys.readouterr().out
    assert f"functions:{function}: {len(outcomes(lines, FAILED))} of " in printed
    for metric in failed:
        assert WORDS[metric].advice in printed and WORDS[metric].advice in Path(
            "audit/audit.html"
        ).read_text().replace("&#39;", "'")


@pytest.mark.usefixtures("folder")
def test_all_lines_pass_for_a_sound_function_by_thresholds_of_ones_own() -> None:
    code, lines = audit("functions:right", "--set", "gates.reward.baseline_lead=-0.1")
    assert (code, outcomes(lines, FAILED)) == (0, set())
    assert lines[ACCURACY]["value"] == pytest.approx(120 / (120 + 1.96**2))  # Wilson's, all right
    assert lines["battery.worst_ending"]["value"] == 0.0


@pytest.mark.usefixtures("folder")
def test_a_second_judge_is_asked_about_endings_and_slices_are_of_a_column() -> None:
    code, lines = audit(
        "functions:fond_of_bangs", "--judge", "functions:fond_of_bangs", "--slice=topic"
    )
    assert code == 3 and lines["battery.worst_ending"]["outcome"] == PASSED  # it likes them, too
    assert lines["battery.judge_lead"]["value"] == 0.0
    metrics = json.loads(Path("audit/audit.json").read_text())["metrics"]
    assert set(metrics["battery"]["accuracy"]["source"]) == set(THINGS)


def test_each_line_has_words_and_a_threshold_of_the_gate() -> None:
    assert {line.metric for line in LINES} == set(WORDS)


@pytest.mark.usefixtures("folder")
def test_what_a_page_shows_is_escaped() -> None:
    Path("pairs.jsonl").write_text(
        "\n".join(
            json.dumps(pair(number) | {"prompt": f"<script>{number}"}) for number in range(60)
        )
    )
    audit("functions:longest")
    page = Path("audit/audit.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page


def alone(model, tokenizer, ids: list[int]) -> float:
    """The score by transformers, of one sequence without padding."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


PROMPTS, RESPONSES = ["The dinner", "A"], [" was great, and long.", " b"]


def test_a_models_scores_are_transformers_also_if_padding_is_eos(models, params) -> None:
    model = Classifier(models / "reward", params)
    model.tokenizer.pad_token = model.tokenizer.eos_token
    eos = model.tokenizer.eos_token_id
    rows = [
        [*model.tokenizer(p).input_ids, *model.tokenizer(r).input_ids, eos]
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    reference = AutoModelForSequenceClassification.from_pretrained(models / "reward")
    expected = [alone(reference, model.tokenizer, ids) for ids in rows]
    assert model(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_conversations_have_the_models_own_template(models, params, tmp_path) -> None:
    """To its end; one of Rondo's reward stage, which is calibrated, is read at EOS."""
    values = params.model_dump(mode="json")
    values["prepare"]["prompt_format"] = "chat"
    chat = check_params(values, "test")
    config = copied(models, tmp_path / "a", "score") / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: values[key] for key in values.keys() - {"mean", "std"}}))
    model = Classifier(tmp_path / "a", chat)
    turns = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    assert model.encode(turns, "Hello") == ids
    at_eos = model.tokenizer(text.removesuffix("\n"), add_special_tokens=False).input_ids
    assert Classifier(models / "reward", chat).encode(turns, "Hello") == at_eos


def test_a_model_without_a_template_is_not_given_conversations(models, params, tmp_path) -> None:
    folder = copied(models, tmp_path / "a", "score")
    (folder / "chat_template.jinja").unlink()
    values = params.model_dump(mode="json")
    values["prepare"]["prompt_format"] = "chat"
    with pytest.raises(BadInput, match=r"no chat template.*prompt_format=plain"):
        Classifier(folder, check_params(values, "test"))


def test_an_encoder_reads_prompt_and_response_as_a_pair(models, params, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "reward")
    tokenizer.chat_template, eos = None, (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = BertProcessing(eos, eos)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = Classifier(tmp_path, params)
    expected = [
        alone(model.model, tokenizer, tokenizer(p, r).input_ids)
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert model(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)


def copied(models: Path, target: Path, head: str, **config: object) -> Path:
    """The reward model, with its head under another name."""
    AutoTokenizer.from_pretrained(models / "reward").save_pretrained(target)
    weights = load_file(models / "reward/model.safetensors")
    weights[f"{head}.weight"] = weights.pop("score.weight")
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    values = json.loads((models / "reward/config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def test_openrlhfs_older_head_is_read_and_a_missing_one_refused(models, params, tmp_path) -> None:
    openrlhf = copied(models, tmp_path / "a", "value_head", value_head_prefix="value_head")
    own, other = Classifier(models / "reward", params), Classifier(openrlhf, params)
    weights = [one.model.state_dict() for one in (own, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    # weights at other addresses of memory: the last bit of a sum may be another
    assert other(PROMPTS, RESPONSES) == pytest.approx(own(PROMPTS, RESPONSES), abs=1e-6)
    with pytest.raises(BadInput, match=r"score\.weight"):
        Classifier(copied(models, tmp_path / "b", "value_head"), params)
    with pytest.raises(BadInput, match=r"says LlamaForCausalLM, expected a \.\.\.ForSequence"):
        Classifier(models / "assets/model", params)
    two = copied(models, tmp_path / "c", "score", id2label={"0": "a", "1": "b"})
    with pytest.raises(BadInput, match="2 labels; a reward model has one"):
        Classifier(two, params)


@pytest.mark.usefixtures("folder")
def test_a_model_is_audited_and_by_itself_has_no_lead(models, params) -> None:
    small = ("--set=model.dtype=float32", "--set=battery.pairs=20", "--set=battery.prompts=4")
    sampled = ("--set=ppo.response_length=4", "--set=battery.best_of=[1,2]")
    model = str(models / "reward")
    code, lines = audit(
        model, "--judge", model, "--policy", str(models / "assets/model"), *small, *sampled
    )
    assert code == 3 and not outcomes(lines, NOT_MEASURED) - {"battery.worst_mined"}
    assert lines["audit.repeat_difference"]["value"] < 1e-3
    assert lines["battery.judge_lead"]["value"] == 0.0
    # by itself, the best of two by score is better
    assert lines["battery.best_of_n.rise_low"]["outcome"] == PASSED


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("compares", [False, True])
def test_a_second_judge_of_the_opposite_opinion_loses_by_the_best_of_n(
    compares: bool, models, chat_server
) -> None:
    def prefers_the_shorter(body: dict[str, list[dict[str, str]]]) -> str:
        text = body["messages"][-1]["content"]
        a, b = (re.findall(rf"<response_{x}>(.*)</response_{x}>", text, re.S)[0] for x in "AB")
        return json.dumps({"preference": "A" if len(a) < len(b) else "B"})

    chat_server.answer = prefers_the_shorter
    judge = chat_server.url if compares else "functions:shortest"
    rubric = ("--set=annotate.endpoint.model=judge", "--set=annotate.endpoint.rubric=Shorter.")
    few = ("--set=battery.pairs=5", "--set=battery.prompts=8", "--set=battery.best_of=[1,4]")
    policy = ("--policy", str(models / "assets/model"), "--set=ppo.response_length=4")
    _, lines = audit("functions:longest", "--judge", judge, *policy, *rubric, *few)
    assert lines["battery.best_of_n.rise_low"]["outcome"] == FAILED


def test_a_servers_scores_are_those_of_its_model(serve, params) -> None:
    """`rondo serve-reward`'s are calibrated: (score - 0.5) / 2."""
    address = serve()
    answers = [
        find_subject(f"{address}/{path}", params).judge(Path("unused")).scores(PROMPTS, RESPONSES)
        for path in ("get_reward", "classify")
    ]
    raw = Classifier(Path("reward"), params)(PROMPTS, RESPONSES)
    for scores in answers:
        assert scores == pytest.approx([(score - 0.5) / 2 for score in raw], abs=1e-4)


@pytest.mark.usefixtures("folder")
def test_a_language_model_is_asked_in_both_orders_and_anew(chat_server, capsys) -> None:
    """It prefers A, unless B alone has a good word: half of the verdicts are ties."""

    def answer(body: dict[str, list[dict[str, str]]]) -> str:
        a = body["messages"][-1]["content"].split("<response_A>")[1].split("</response_A>")[0]
        known = any(word in a for word in (*GOOD[:2], *BAD))
        return json.dumps({"preference": "B" if known and not any(w in a for w in GOOD) else "A"})

    chat_server.answer = answer
    settings = ("--set=annotate.endpoint.model=judge", "--set=annotate.endpoint.rubric=Nicer.")
    code, lines = audit(chat_server.url, *settings)
    assert lines["audit.repeat_difference"] | {} and lines["audit.repeat_difference"]["value"] == 0
    assert outcomes(lines, NOT_MEASURED) >= {"battery.worst_probe", "reward.margin"}
    assert lines["battery.worst_probe"]["reason"] == "it compares two texts and gives none a score"
    assert (code, lines[ACCURACY]["outcome"]) == (3 if outcomes(lines, FAILED) else 0, PASSED)
    # each pair in both orders, and the first 32 again, whose answers are not those kept
    assert len(chat_server.seen) == 2 * (120 + 32)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["functions:nowhere"], "functions:nowhere cannot be imported"),
        (["functions:needs_labels"], "its function requires label"),
        (["functions:broken"], "failed: returned nan, not a finite number"),
        (["nowhere"], "nowhere: no such file or folder here"),
        (["http://localhost/score"], "ends with /get_reward (OpenRLHF's protocol), /classify"),
        (["http://localhost/v1"], "which model, and by what?"),
        (["functions:right", "--set=gates.reward.accurcy=1"], "accurcy"),
        (["functions:right", "--max-minutes=0"], "--max-minutes 0: expected more than 0"),
        (["functions:right", "--slice=nothing"], "pairs.jsonl:1: no column nothing (--slice)"),
        (["functions:right", "--policy=nowhere"], "--policy nowhere: no such file"),
    ],
)
def test_what_cannot_be_audited_is_named(words, expected, capsys) -> None:
    code = exit_code(["audit-reward", *words, "--pairs", "pairs.jsonl"])
    assert (code in (1, 2), Path("audit").exists()) == (True, False)
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_too_few_pairs_name_the_first_row_that_is_none(capsys) -> None:
    rows = [json.dumps(pair(number)) for number in range(9)]
    Path("few.jsonl").write_text("\n".join([*rows, '{"prompt": "a", "chosen": "b"}']))
    assert exit_code(["audit-reward", "functions:right", "--pairs", "few.jsonl"]) == 2
    message = capsys.readouterr().err
    assert "few.jsonl: 9 pairs, expected at least 50; the first other row, few.jsonl:10" in message


def test_fewer_pairs_fit_into_less_time(folder, capsys) -> None:
    rows = read_pairs(SourceParams(path="pairs.jsonl"), None).rows
    judge = find_subject("functions:right", Params()).judge(folder)
    assert len(that_fit(rows, judge, Params(), 1e6)) == 120
    assert "all 120 pairs" in capsys.readouterr().out
    slow = find_subject("functions:right", Params()).judge(folder)
    assert len(that_fit(rows, slow, Params(), 1e-9)) == 50
    assert "of 120 pairs 50, at random" in capsys.readouterr().out


def test_word_counts_are_measured_on_other_prompts_than_they_were_fitted_on() -> None:
    """Words that are new in each pair say nothing about another one, so its answer is a tie."""
    pairs = [
        {"id": str(n), "prompt": f"p{n}", "chosen": f"a{n}b{n}", "rejected": f"c{n}d{n}"}
        for n in range(20)
    ]
    assert word_accuracy(pairs, 0) == 0.5
    shared = [row | {"chosen": " good word", "rejected": " bad word"} for row in pairs]
    assert word_accuracy(shared, 0) == 1.0 and not math.isnan(word_accuracy(pairs[:1], 0))
