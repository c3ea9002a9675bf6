"""Training texts within max_length, on a tokenizer whose tokens are letters."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from flows.core.config import resolve
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params
from stages.lib.data.lengths import check_lengths, report_overlong, tokenize_fitting
from tests.paths import ROOT

EOS = 0


class Letters:
    """a is 1, b is 2, ..."""

    eos_token_id = EOS
    bos_token_id = None
    init_kwargs = MappingProxyType({})

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) - 96 for letter in text])


def params(overlong: str, max_length: int = 8) -> Params:
    sections = {"reward": {"max_length": max_length, "overlong": overlong}}
    return Params.model_validate(sections)


# prompt, chosen and rejected with EOS: 2 + 6 = 8 tokens; 2 + 7; 9 + 3
PAIRS = [
    {"prompt": "ab", "chosen": "cdefg", "rejected": "c"},
    {"prompt": "ab", "chosen": "c", "rejected": "defghi"},
    {"prompt": "abcdefghi", "chosen": "jk", "rejected": "j"},
]


def test_a_pair_with_a_side_that_does_not_fit_is_left_out_and_counted() -> None:
    kept = tokenize_fitting(Letters(), PAIRS, ("chosen", "rejected"), params("drop"), "reward")
    assert kept.rows == PAIRS[:1] and kept.overlong == 2
    assert kept.texts("chosen") == [[1, 2, 3, 4, 5, 6, 7, EOS]]
    assert kept.texts("rejected") == [[1, 2, 3, EOS]]


def test_a_closed_pair_keeps_one_prompt_and_both_sides_end_with_eos() -> None:
    kept = tokenize_fitting(Letters(), PAIRS, ("chosen", "rejected"), params("close"), "reward")
    assert kept.rows == PAIRS and kept.overlong == 2
    # the prompt gives way until the longest response has a quarter, 2 tokens; it keeps its end
    assert kept.prompts == [[1, 2], [1, 2], [4, 5, 6, 7, 8, 9]]
    assert kept.responses == {
        "chosen": [[3, 4, 5, 6, 7, EOS], [3, EOS], [10, EOS]],
        "rejected": [[3, EOS], [4, 5, 6, 7, 8, EOS], [10, EOS]],
    }


def test_if_no_text_fits_the_error_names_the_keys() -> None:
    with pytest.raises(BadInput, match=r"all 2 rows .*reward\.max_length \(8 .*reward\.overlong"):
        tokenize_fitting(Letters(), PAIRS[1:], ("chosen", "rejected"), params("drop"), "reward")
    none = tokenize_fitting(Letters(), PAIRS[:0], ("chosen",), params("drop"), "reward")
    assert none.rows == [] and none.texts("chosen") == []


def test_the_number_of_overlong_texts_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report_overlong("reward@r0", 0, 9, "reward", params("drop"))
    assert capsys.readouterr().out == ""
    report_overlong("reward@r0", 2, 9, "reward", params("drop"))
    assert "2 of 9 texts are longer than reward.max_length (8 tokens): left out" in (
        capsys.readouterr().out
    )
    report_overlong("reward@r0", 2, 9, "reward", params("close"))
    assert "cut and closed with EOS" in capsys.readouterr().out


@pytest.mark.parametrize("section", ["sft", "reward"])
def test_a_stage_is_trained_on_texts_as_long_as_the_policys(section: str) -> None:
    lengths = {"prepare": {"max_prompt_tokens": 40}, "ppo": {"response_length": 20}}
    check_lengths(Params.model_validate(lengths | {section: {"max_length": 61}}))
    short = Params.model_validate(lengths | {section: {"max_length": 60}})
    with pytest.raises(BadInput, match=rf"{section}\.max_length is 60, .* at least 61"):
        check_lengths(short)


def test_a_run_with_lengths_that_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(BadInput, match=r"ppo\.response_length \(500\)"):
        resolve("smoke", None, ["ppo.response_length=500"])
