"""Requests that wait for the reward model: one thread scores as many at once as fit into a batch.

So requests that arrive while a batch is scored share the next one. A large request is scored in
parts, between which others do not come, but it can be cancelled.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread

from stages.lib.core.types import TokenIds

Score = Callable[[list[TokenIds]], list[float]]


class QueueFull(Exception):
    """More tokens wait than `max_waiting_tokens`. A retry may succeed."""


class NotFinite(Exception):
    """A score is NaN or infinite."""


@dataclass
class Waiting:
    """A request's token sequences, or a part of them, and the future of their scores."""

    sequences: list[TokenIds]
    scores: "Future[list[float]]" = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


class ScoringQueue:
    """
    Args:
        score: scores sequences of tokens; only this queue's thread calls it.
        batch_tokens: tokens of a batch; a sequence that has more is a batch of its own.
        max_waiting_tokens: of requests that have not begun.
    """

    def __init__(self, score: Score, batch_tokens: int, max_waiting_tokens: int) -> None:
        self.score, self.batch_tokens = score, batch_tokens
        self.max_waiting_tokens = max_waiting_tokens
        self.waiting: deque[Waiting] = deque()
        self.changed, self.closed = Condition(), False
        self.thread = Thread(target=self._run, name="scoring", daemon=True)
        self.thread.start()

    def submit(self, sequences: list[TokenIds]) -> "list[Future[list[float]]]":
        """The scores in parts, one per sequence. A part that is cancelled before its batch begins
        costs nothing.

        Raises:
            QueueFull: too many tokens wait already.
        """
        parts = [Waiting(part) for part in self._split(sequences)]
        tokens = sum(map(len, sequences))
        with self.changed:
            waiting = sum(part.tokens for part in self.waiting)
            # a request that is larger than the limit is accepted if nothing else waits
            if self.closed or (waiting and waiting + tokens > self.max_waiting_tokens):
                raise QueueFull(f"{waiting} tokens wait")
            self.waiting += parts
            self.changed.notify()
        return [part.scores for part in parts]

    def _split(self, sequences: list[TokenIds]) -> list[list[TokenIds]]:
        """Consecutive sequences of at most `batch_tokens`, or single ones that have more."""
        parts: list[list[TokenIds]] = []
        tokens = 0
        for sequence in sequences:
            if not parts or tokens + len(sequence) > self.batch_tokens:
                parts.append([])
                tokens = 0
            parts[-1].append(sequence)
            tokens += len(sequence)
        return parts

    def close(self) -> None:
        """Score what waits, accept nothing more, and end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._score(batch)

    def _next_batch(self) -> list[Waiting]:
        """Wait for requests, and take the first ones; [] after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closed)
            batch: list[Waiting] = []
            tokens = 0
            while self.waiting and (
                not batch or tokens + self.waiting[0].tokens <= self.batch_tokens
            ):
                batch.append(self.waiting.popleft())
                tokens += batch[-1].tokens
            return batch

    def _score(self, batch: list[Waiting]) -> None:
        running = [request for request in batch if request.scores.set_running_or_notify_cancel()]
        sequences = [sequence for request in running for sequence in request.sequences]
        try:
            scores = iter(self.score(sequences) if sequences else [])
        except Exception as error:  # the server goes on: the next batch may be smaller
            for request in running:
                request.scores.set_exception(error)
            return
        for request in running:
            own = [next(scores) for _ in request.sequences]
            if all(map(math.isfinite, own)):
                request.scores.set_result(own)
            else:
                request.scores.set_exception(NotFinite(f"a score is not finite: {own}"))
