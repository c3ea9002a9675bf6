"""Requests that share a batch, wait, fail or are cancelled. A sequence's score is its sum."""

import threading

import pytest

from flows.serving.scoring_queue import NotFinite, QueueFull, ScoringQueue


class Model:
    """Scores by sums; waits before each batch until `go_on`, if it `holds`."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.started, self.go_on = threading.Event(), threading.Event()

    def __call__(self, sequences: list[list[int]]) -> list[float]:
        self.batches.append(sequences)
        self.started.set()
        self.go_on.wait(60)
        return [float(sum(sequence)) for sequence in sequences]


def scores(parts) -> list[float]:
    """The scores of a request."""
    return [score for part in parts for score in part.result(60)]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def queue(model):
    queue = ScoringQueue(model, batch_tokens=6, max_waiting_tokens=10)
    yield queue
    model.go_on.set()
    queue.close()


def test_waiting_requests_share_batches_of_at_most_batch_tokens(queue, model):
    first = queue.submit([[1]])
    model.started.wait(60)
    others = [queue.submit(sequences) for sequences in ([[1, 2], [3]], [[4, 5, 6]], [[7]], [[8]])]
    model.go_on.set()
    assert scores(first) == [1.0]
    assert [scores(other) for other in others] == [[3.0, 3.0], [15.0], [7.0], [8.0]]
    # 3 + 3 tokens fit, a seventh does not
    assert model.batches == [[[1]], [[1, 2], [3], [4, 5, 6]], [[7], [8]]]


def test_a_request_that_is_larger_than_a_batch_is_scored_in_parts(queue, model):
    model.go_on.set()
    sequences = [[1] * 3, [2] * 3, [3] * 8, [4]]
    assert scores(queue.submit(sequences)) == [3.0, 6.0, 24.0, 4.0]
    assert model.batches == [sequences[:2], sequences[2:3], sequences[3:]]


def test_a_full_queue_refuses_unless_nothing_waits(queue, model):
    queue.submit([[1]])
    model.started.wait(60)
    large = queue.submit([[1] * 50])  # nothing waits: it could never be scored otherwise
    with pytest.raises(QueueFull, match="50 tokens wait"):
        queue.submit([[1]])
    model.go_on.set()
    assert scores(large) == [50.0]
    assert scores(queue.submit([[2]])) == [2.0]


def test_a_queue_takes_requests_up_to_its_limit(queue, model):
    queue.submit([[1]])
    model.started.wait(60)
    queue.submit([[1] * 4])
    queue.submit([[1] * 6])
    with pytest.raises(QueueFull, match="10 tokens wait"):
        queue.submit([[1]])


def test_a_cancelled_part_is_not_scored(queue, model):
    queue.submit([[1]])
    model.started.wait(60)
    [gone], stays = queue.submit([[2]]), queue.submit([[3]])
    assert gone.cancel()
    model.go_on.set()
    assert scores(stays) == [3.0]
    assert model.batches[1:] == [[[3]]]


def test_only_the_request_whose_score_is_not_finite_fails():
    started, go_on = threading.Event(), threading.Event()

    def score(sequences):
        started.set()
        go_on.wait(60)
        return [float("inf") if sequence == [2] else 1.0 for sequence in sequences]

    queue = ScoringQueue(score, 100, 100)
    queue.submit([[0]])
    started.wait(60)
    [bad], good = queue.submit([[1], [2]]), queue.submit([[3]])
    go_on.set()
    assert scores(good) == [1.0]
    assert isinstance(bad.exception(60), NotFinite)
    queue.close()


def test_closing_scores_what_waits_and_accepts_nothing_more(queue, model):
    waiting = [queue.submit([[1]]), queue.submit([[2] * 6])]
    model.go_on.set()
    queue.close()
    assert [scores(one) for one in waiting] == [[1.0], [12.0]]
    with pytest.raises(QueueFull):
        queue.submit([[1]])
