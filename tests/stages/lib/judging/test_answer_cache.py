"""Cached answers: the first one is kept, for every thread and process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.lib.judging.chat import Answer, AnswerCache


def test_the_first_answer_is_kept_and_can_be_read_again(tmp_path: Path) -> None:
    first, other = AnswerCache(tmp_path / "cache"), AnswerCache(tmp_path / "cache")
    assert first.get("question") is None
    assert first.put("question", Answer("A", 100, 10)) == Answer("A", 100, 10)
    assert other.put("question", Answer("B", 90, 9)) == Answer("A", 100, 10)
    assert AnswerCache(tmp_path / "cache").get("question") == Answer("A", 100, 10)


def test_threads_that_answer_at_once_agree(tmp_path: Path) -> None:
    answers = AnswerCache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        kept = list(
            pool.map(lambda number: answers.put("question", Answer(str(number), 1, 1)), range(40))
        )
    assert len(set(kept)) == 1
