"""Stands in for verl's base class of checkpoint callbacks."""

from typing import Any


class CheckpointCallback:
    def __init__(self, config: Any = None) -> None:
        self.config = config
