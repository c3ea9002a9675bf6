"""Downloads by pip from a wheel on disk: no network."""

import zipfile
from pathlib import Path

import pytest

from stages.assets.fetch import DOWNLOADS, Package, check_sha256, fetch
from stages.errors import BadInput
from stages.records import file_hash

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # sha256 of "hello", as published everywhere


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    return path


def test_right_and_wrong_checksum(tmp_path: Path) -> None:
    file = tmp_path / "greeting.txt"
    file.write_text("hello")
    check_sha256(file, HELLO)
    file.write_text("hello!")
    with pytest.raises(
        BadInput, match=rf"greeting\.txt: expected sha256 {HELLO}, got ce06092fb948d9ffac7d1a376e404b26b7575bcc11ee05a4615fef4fec3a308b"
    ):
        check_sha256(file, HELLO)


def test_a_download_is_kept_and_not_fetched_again(wheel: Path) -> None:
    package = Package(str(wheel), file_hash(wheel))
    first = fetch(package)
    wheel.unlink()
    assert fetch(package) == first == DOWNLOADS / package.sha256
    with pytest.raises(BadInput, match="pip could not download it"):
        fetch(Package(str(wheel), HELLO))


def test_a_wrong_download_leaves_nothing(wheel: Path) -> None:
    with pytest.raises(BadInput, match=rf"small-1\.0.*expected sha256 {HELLO}, got {file_hash(wheel)}"):
        fetch(Package(str(wheel), HELLO))
    assert list(DOWNLOADS.iterdir()) == []
