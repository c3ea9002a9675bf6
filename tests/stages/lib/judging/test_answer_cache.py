"""Answers on disk: the first one stands, for every thread and process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.lib.judging.answer_cache import Answer, Answers


def test_the_first_answer_stands_and_is_found_again(tmp_path: Path) -> None:
    first, other = Answers(tmp_path / "cache"), Answers(tmp_path / "cache")
    assert first.get("question") is None
    assert first.keep("question", Answer("A", 100, 10)) == Answer("A", 100, 10)
    assert other.keep("question", Answer("B", 90, 9)) == Answer("A", 100, 10)
    assert Answers(tmp_path / "cache").get("question") == Answer("A", 100, 10)


def test_threads_that_answer_at_once_agree(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        kept = list(
            pool.map(lambda number: answers.keep("question", Answer(str(number), 1, 1)), range(40))
        )
    assert len(set(kept)) == 1
