"""The tokens of texts that engines send."""

import pytest

from flows.serving.texts import Texts, Unreadable
from stages.assets.base_model import tiny_tokenizer
from tests.tokenizers import make_bos_tokenizer, make_boundary_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def texts_of(tokenizer, max_tokens: int = 100) -> Texts:
    return Texts(tokenizer, (tokenizer.eos_token, "</turn>"), max_tokens)


def test_prompt_and_response_are_tokenised_apart_if_the_query_begins_with_the_prompt(tokenizer):
    """As in training: `Th` and `e day` are other tokens than `The day`."""
    texts, eos = texts_of(tokenizer), [tokenizer.eos_token_id]
    apart = tokenizer("Th").input_ids + tokenizer("e day").input_ids + eos
    together = tokenizer("The day").input_ids + eos
    assert apart != together
    assert texts.encode("The day", "Th") == apart
    for prompt in (None, "", "A night"):
        assert texts.encode("The day", prompt) == together


def test_a_response_after_a_word_boundary_has_the_tokens_of_the_whole_text():
    tokenizer = make_boundary_tokenizer("normalizer")
    expected = [*tokenizer("The dinner was good.").input_ids, tokenizer.eos_token_id]
    for prompt in ("The dinner", None):
        assert texts_of(tokenizer).encode("The dinner was good.", prompt) == expected


def test_a_text_begins_with_one_bos_if_the_model_begins_texts_so():
    tokenizer = make_bos_tokenizer()
    bos = tokenizer.bos_token_id
    texts = texts_of(tokenizer)
    expected = [*tokenizer("The day").input_ids, tokenizer.eos_token_id]
    assert expected[0] == bos and expected.count(bos) == 1
    for text in ("The day", "<|begin|>The day"):
        assert texts.encode(text, None) == expected


@pytest.mark.parametrize(
    "end", ["{eos}", "</turn>", "</turn>{eos}", "{eos}\n", "</turn>\n{pad}{pad}"]
)
def test_ends_and_padding_are_removed_and_white_space_of_the_response_stays(tokenizer, end):
    texts, tokens = texts_of(tokenizer), {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token}
    for text in ("The day", "The day \n"):
        expected = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        assert texts.encode(text + end.format(**tokens), None) == expected
        assert texts.encode(tokens["pad"] * 2 + text + end.format(**tokens), None) == expected


def test_an_empty_response_is_one_eos(tokenizer):
    texts = texts_of(tokenizer)
    expected = [*tokenizer("The day").input_ids, tokenizer.eos_token_id]
    assert texts.encode("The day", "The day") == expected


def test_a_text_of_as_many_tokens_as_the_model_has_positions_fits(tokenizer):
    number = len(texts_of(tokenizer).encode("The day was good.", None))
    assert len(texts_of(tokenizer, number).encode("The day was good.", None)) == number
    with pytest.raises(Unreadable, match=f"has {number} tokens, the limit is {number - 1}"):
        texts_of(tokenizer, number - 1).encode("The day was good.", None)


def test_much_padding_is_removed_in_linear_time(tokenizer):
    texts = texts_of(tokenizer, 10**6)
    pad = tokenizer.pad_token * 200_000
    assert texts.without_ends(f"{pad}The day{pad}") == "The day"
