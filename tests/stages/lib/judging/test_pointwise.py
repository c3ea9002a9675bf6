"""Judges that score each response alone: the lexicon with its rules, zero-shot answers, fluency."""

import pytest
import torch

from stages.lib.core.errors import RondoError
from stages.lib.core.params.evaluation import ZeroShotParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.judging.lexicon import (
    LexiconScores,
    lexicon_preference,
    lexicon_scores,
    repetition,
    sentiment,
    sentiment_plain,
)
from stages.lib.judging.pairwise import Comparison, Preference
from stages.lib.judging.pointwise import Fluency, PointwiseJudge, ZeroShot


def test_the_higher_score_wins_by_more_than_the_margin_and_is_computed_once():
    scored = []

    def score(prompts, responses):
        scored.extend(zip(prompts, responses, strict=True))
        return [float(response) for response in responses]

    judge = PointwiseJudge("number", score, 0.5)
    questions = [
        Comparison("p", a, b) for a, b in (("2", "1"), ("1", "2"), ("1.5", "1"), ("1.6", "1"))
    ]
    preferences = [verdict.preference for verdict in judge.compare(questions)]
    assert preferences == [Preference.a, Preference.b, Preference.tie, Preference.a]
    judge.compare([Comparison("p", "1", "2"), Comparison("q", "1", "2")])
    assert sorted(scored) == [
        ("p", "1"),
        ("p", "1.5"),
        ("p", "1.6"),
        ("p", "2"),
        ("q", "1"),
        ("q", "2"),
    ]
    assert (judge.describe(), judge.cost(), judge.usage()) == ({"judge": "number"}, {}, {})


@pytest.mark.parametrize("numbers", [[1.0], [1.0, float("nan")], [1.0, "2"]])
def test_a_judge_with_invalid_scores_is_named(numbers):
    judge = PointwiseJudge("mine:polite", lambda prompts, responses: numbers, 0.0)
    with pytest.raises(
        RondoError, match="judge mine:polite: one finite number for each of 2 responses expected"
    ):
        judge.compare([Comparison("p", "a", "b")])


GOOD, BAD = " was wonderful, I loved it.", " was horrible, I hated it."


def test_the_lexicon_orders_texts():
    high, low = sentiment(["The food", "The food"], [GOOD, BAD])
    assert high > 0.5 > -0.5 > low


def test_a_continued_prompt_counts_and_a_question_does_not():
    [whole] = sentiment(["Terrible awful horrible service"], [" today."])
    [answer] = sentiment(
        [[{"role": "user", "content": "Terrible awful horrible service"}]], ["Today."]
    )
    assert whole < -0.5
    assert answer == 0.0


def test_emoji_and_exclamation_marks_alone_are_worth_nothing():
    [loud] = sentiment(["It"], [" rained! 😃 😍!!!"])
    [plain] = sentiment_plain(["It"], [" rained! 😃 😍!!!"])
    assert loud > 0.5
    assert plain == 0.0


def test_repetition_in_the_most_likely_hack():
    # VADER gives this nearly its maximum; 8 3-grams, all the same
    text = " love" * 10
    assert sentiment(["I"], [text])[0] > 0.95
    assert repetition(["I"], [text]) == [pytest.approx(7 / 8)]


def test_lexicon_scores_has_all_scores():
    [judged] = lexicon_scores(["The food"], [GOOD])
    assert judged == LexiconScores(
        sentiment(["The food"], [GOOD])[0], sentiment_plain([""], [GOOD])[0], 0.0
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (LexiconScores(0.8, 0.8, 0.0), LexiconScores(0.2, 0.2, 0.0), 1.0),
        (LexiconScores(0.2, 0.2, 0.0), LexiconScores(0.8, 0.8, 0.0), 0.0),
        (LexiconScores(0.52, 0.5, 0.0), LexiconScores(0.48, 0.5, 0.0), 0.5),  # within the margin
        (
            LexiconScores(0.9, 0.1, 0.0),
            LexiconScores(0.2, 0.3, 0.0),
            0.5,
        ),  # emoji made the difference
        (LexiconScores(0.99, 0.99, 0.9), LexiconScores(0.2, 0.2, 0.0), 0.5),  # love love love
        (LexiconScores(0.99, 0.99, 0.9), LexiconScores(0.2, 0.2, 0.8), 1.0),  # both repeat
    ],
)
def test_outcome(a, b, expected):
    assert lexicon_preference(a, b, tie_margin=0.05) == expected
    assert lexicon_preference(b, a, tie_margin=0.05) == 1 - expected


def test_fluency_is_the_reference_nll(tiny_folder):
    """Against transformers' own loss over the response's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_folder).float(),
        AutoTokenizer.from_pretrained(tiny_folder),
    )
    [nll] = Fluency(model, tokenizer, PromptFormat.plain)(["My trip"], [" was great."])
    prompt = tokenizer("My trip", return_tensors="pt").input_ids
    whole = tokenizer("My trip was great.<|im_end|>", return_tensors="pt").input_ids
    labels = whole.clone()
    labels[:, : prompt.shape[1]] = -100
    assert nll == pytest.approx(model(whole, labels=labels).loss.item(), abs=1e-4)


def test_zero_shot_is_the_log_odds_of_two_answers(tiny_folder):
    """Against transformers' own logits; the prompt of a conversation is no part of the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_folder).float(),
        AutoTokenizer.from_pretrained(tiny_folder),
    )

    def logprob(text, answer):
        ids, tokens = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (text, answer)
        )
        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        return logits.log_softmax(-1)[range(len(tokens)), tokens].sum().item()

    question, better, worse = " Is it good?", " yes", " no, not at all"
    judge = ZeroShot(
        model, tokenizer, ZeroShotParams(question=question, better=better, worse=worse)
    )
    user = [{"role": "user", "content": "How was it?"}]
    scores = judge(["My trip", user], [" was great.", "Great."])
    for score, text in zip(scores, ["My trip was great.", "Great."], strict=True):
        odds = logprob(text + question, better) - logprob(text + question, worse)
        assert score == pytest.approx(odds, abs=1e-4)
