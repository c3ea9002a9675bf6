"""Resume state: what a run that was killed goes on from, bit by bit as if it had not been.

It lies in the work folder, since DVC deletes a stage's outputs before it runs the stage again. It
holds all that the next update depends on, and what the outputs will be made of; it is thrown away
when the stage has ended.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy
import torch

from stages.lib.core.types import Row, StateDict


class Resume:
    """A file `state.pt`, replaced whole, in a folder of its own for each `identity` (inputs,
    params, code).
    """

    def __init__(self, work: Path, identity: Row) -> None:
        self.folder = (
            work / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        )
        self.path = self.folder / "state.pt"

    def load(self) -> StateDict | None:
        """The last state, None if there is none of this run."""
        if not self.path.exists():
            return None
        state: StateDict = torch.load(self.path, map_location="cpu", weights_only=True)
        return state

    def save(self, state: StateDict) -> None:
        """Written under another name, flushed to the disk, renamed: a kill at any moment leaves
        this state or the one before.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self.path)
        folder = os.open(self.folder, os.O_RDONLY)  # the new name itself
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def random_state() -> StateDict:
    """Of every generator that a library may draw from behind our back."""
    version, words, gauss_next = random.getstate()
    kind, keys, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss_next],
        "numpy": [kind, [int(key) for key in keys], place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: StateDict) -> None:
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
