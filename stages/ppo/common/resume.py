"""Resume state: a killed run continues from it, with the same bits as an uninterrupted run.

The state is in the work folder, because DVC deletes a stage's outputs before it runs the stage
again. It contains everything that the next update and the outputs depend on. It is deleted after
DVC has recorded the outputs (flows/execution/dvc_stages.py), so that a stage whose outputs could
not be recorded has nothing to compute again.
"""

import hashlib
import random
import shutil
from functools import cache
from pathlib import Path

import numpy
import torch

from stages.lib.core.errors import BadInput, start_again
from stages.lib.core.files import RESUME_STATE, file_hash, json_hash, replacing
from stages.lib.core.params import Params
from stages.lib.core.progress import progress
from stages.lib.core.types import Metrics, StateDict
from stages.lib.core.user_functions import imported_files
from stages.lib.core.user_inputs import engine_code, input_hashes

ROOT, PROGRAM = Path(__file__).parents[3], Path("stages/ppo/__main__.py")
THRESHOLDS = Path("stages/lib/thresholds")
DIGEST_BYTES = hashlib.sha256().digest_size


class Resume:
    """The file `state.pt`, in one folder per `identity` (inputs, params, code): an archive of
    torch, and behind it its sha256.
    """

    def __init__(self, work: Path, identity: Metrics) -> None:
        self.folder = work / json_hash(identity)[:12]
        self.path = self.folder / RESUME_STATE

    def load(self, mapped: bool = False) -> StateDict | None:
        """The last saved state, None if this run has none.

        mapped: its tensors stay in the file until they are read, for processes that need only parts
        of them.

        Raises:
            BadInput: the file is damaged.
        """
        if not self.path.exists():
            return None
        self._check()
        state: StateDict = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        return state

    def _check(self) -> None:
        """torch compares no checksum: a flipped bit in a weight would be loaded."""
        size = max(self.path.stat().st_size - DIGEST_BYTES, 0)
        with self.path.open("rb") as stream:
            stream.seek(size)
            recorded = stream.read()
        if recorded != _sha256(self.path, size):
            raise BadInput(
                f"{self.path}: damaged, so that the stage cannot resume from it. "
                f"{start_again(self.folder)}"
            )

    def save(self, state: StateDict) -> None:
        """Replace the state. A kill at any moment leaves either the old or the new one."""
        with progress(f"saving {self.path}"), replacing(self.path) as stream:
            torch.save(state, stream)
            stream.flush()
            stream.write(_sha256(Path(stream.name), stream.tell()))

    def clear(self) -> None:
        """Delete the folder of this run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sha256(path: Path, size: int) -> bytes:
    """The digest of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with progress(f"hashing {path}", size, "bytes") as hashing, path.open("rb") as stream:
        while block := stream.read(min(1 << 20, size - stream.tell())):
            digest.update(block)
            hashing.add(len(block))
    return digest.digest()


def run_identity(params: Params, inputs: list[Path]) -> Metrics:
    """Everything that determines a run of the policy stage: params, inputs, the code that it
    imports, and with an engine also the engine's.
    """
    sections = params.model_dump(
        mode="json",
        include={
            "seed": True,
            "ppo": True,
            "model": True,
            "prepare": {"prompt_format", "max_prompt_tokens"},
            "reward": {"max_length", "overlong"},
            "algorithm": True,
            params.algorithm.value: True,
        },
    )
    files = {str(path): file_hash(path) for path in [*inputs, *imported_code()]}
    hashes = input_hashes(params)
    return {"params": sections, "files": files} | {
        kind: hashes[kind] for kind in ("rewards", "primary_judge", "engine")
    }


@cache
def imported_code() -> list[Path]:
    """The code of the policy stage, without that of engines, which is an input (`engine`), and
    without the thresholds of gates, which are settings that it does not read.
    """
    files = set(imported_files(PROGRAM, ROOT)) - set(engine_code(ROOT))
    return sorted(ROOT / path for path in files if not path.is_relative_to(THRESHOLDS))


def random_state() -> StateDict:
    """The state of every global generator, since a library may draw from any of them.

    Of the GPUs only the one in use: the run may resume on a machine that has another number.
    """
    version, words, gauss_next = random.getstate()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss_next],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: StateDict) -> None:
    """Restore a `random_state`."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
