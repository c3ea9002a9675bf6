"""One damaged file, and what the commands that a person runs next make of it."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.lab import Ended
from tests.faults.scale import ALL, FULL

SEED = 20261127


def flip_a_bit(content: bytes) -> bytes:
    """One flipped bit at a seeded position, as a disk or memory leaves it."""
    drawn = random.Random(SEED)
    position = drawn.randrange(len(content))
    flipped = content[position] ^ 1 << drawn.randrange(8)
    return content[:position] + bytes([flipped]) + content[position + 1 :]


def cut_to_half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def empty(content: bytes) -> bytes:
    return b""


Damage = Callable[[bytes], bytes]
DAMAGES: list[Damage] = [flip_a_bit, cut_to_half, empty]


def with_damages(kinds: Sequence[tuple[object, ...]], first: Damage) -> list[tuple[object, ...]]:
    """Each kind of file with one of the damages in turn, with RONDO_FAULTS=all with all of them; in
    `make test` only the first kind, with `first`.
    """
    if ALL:
        return [(*kind, damage) for kind in kinds for damage in DAMAGES]
    if FULL:
        return [(*kind, DAMAGES[number % 3]) for number, kind in enumerate(kinds)]
    return [(*kinds[0], first)]


def damage_file(path: Path, damage: Damage) -> None:
    """Damage a file as a failing disk does: its times and its mode stay, so that nothing but its
    content tells.
    """
    status, content = path.stat(), path.read_bytes()
    damaged = damage(content)
    assert damaged != content, f"{path} is empty"
    path.chmod(0o600)
    path.write_bytes(damaged)
    path.chmod(status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@dataclass(frozen=True)
class Outcome:
    """What came of a damage.

    ended: the command that was run next. name: of the file, as an error has to name it. differ: the
    results that are not those of the undamaged project. lost: the same after the commands that the
    error names; empty if there was none. unread: why nobody reads the file, or why its damage
    changes no result.
    """

    damage: str
    name: str
    ended: Ended
    differ: tuple[str, ...]
    lost: tuple[str, ...] = ()
    unread: str = ""

    @property
    def kind(self) -> str:
        """`refused`: by a typed error that names file and next step, and after that step nothing is
        lost. `restored`: all results are those of the undamaged project. `unread`: none but the
        damaged file differs, as declared. `different`: a silent difference. `stopped`: the rest.
        """
        if self.ended.code:
            return "refused" if self.is_refusal() and not self.lost else "stopped"
        if not self.differ:
            return "restored"
        return "unread" if self.unread and self.differ == (self.name,) else "different"

    def is_refusal(self) -> bool:
        output = self.ended.output
        typed = any(f"{name}: " in output for name in ("BadInput", "StorageFailed", "RondoError"))
        # of a folder that DVC tracks as one, the error names the folder
        named = self.name in output or str(Path(self.name).parent) + ":" in output
        return typed and named and "Traceback" not in output

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.name}, {self.damage}\ndiffer: {self.differ}\nlost: {self.lost}\n"
            f"--- code {self.ended.code}\n{self.ended.output[-2500:]}"
        )
