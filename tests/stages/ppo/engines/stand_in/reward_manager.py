"""Stands in for verl's base class of reward managers."""

from typing import Any


class RewardManagerBase:
    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
