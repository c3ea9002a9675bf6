"""Damage of a file as a failing disk does it: its times and its mode stay."""

import os
from collections.abc import Callable
from pathlib import Path


def flip_a_bit(content: bytes) -> bytes:
    """One flipped bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def cut_to_half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_file(path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Damage a file; nothing but its content, and maybe its size, tells."""
    status, content = path.stat(), path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(damage(content))
    path.chmod(status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.read_bytes() != content, f"{path} is empty"
