"""Downloads by pip from a wheel on disk, and from local indexes that fail."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.assets.pypi import DOWNLOADS, Package, fetch
from stages.lib.core.errors import BadInput, RondoError, Unreachable
from stages.lib.core.files import file_hash

# sha256 of "hello": printf hello | sha256sum
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
        )
        archive.writestr(
            "small-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("small-1.0.dist-info/RECORD", "")
    return path


def test_a_download_is_cached(wheel: Path) -> None:
    package = Package(wheel.as_uri(), file_hash(wheel))
    first = fetch(package)
    wheel.unlink()
    assert fetch(package) == first == DOWNLOADS / package.sha256
    with pytest.raises(BadInput, match="pip could not download it"):
        fetch(Package(wheel.as_uri(), HELLO))


def test_a_wrong_download_leaves_nothing(wheel: Path) -> None:
    with pytest.raises(BadInput, match=rf"(?s)small-1\.0.*{HELLO}.*Got +{file_hash(wheel)}"):
        fetch(Package(wheel.as_uri(), HELLO))
    assert list(DOWNLOADS.iterdir()) == []


def test_a_replaced_source_distribution_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = (
        f"import setuptools; open({str(tmp_path / 'ran')!r}, 'w'); setuptools.setup(name='small')"
    )
    with tarfile.open(tmp_path / "small-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", "Name: small\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"small-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    options = ("--no-binary", ":all:", "--no-build-isolation")
    package = Package((tmp_path / "small-1.0.tar.gz").as_uri(), HELLO, options)
    with pytest.raises(BadInput, match=f"(?s){HELLO}.*Got"):
        fetch(package)
    assert not (tmp_path / "ran").exists()
    right = file_hash(tmp_path / "small-1.0.tar.gz")
    fetch(replace(package, sha256=right))
    assert (tmp_path / "ran").exists()  # so the attack would have worked


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets pip's index, without retries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return lambda url: monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")


def test_an_index_that_refuses_connections(index: Callable[[str], None]) -> None:
    index("http://127.0.0.1:9")
    message = r"pip could not reach the index \(.*[Cc]onnection refused.*; check the network"
    with pytest.raises(Unreachable, match=rf"small==1\.0: {message}"):
        fetch(Package("small==1.0", HELLO))


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [(503, Unreachable, "503"), (504, Unreachable, "504"), (404, BadInput, "No matching")],
)
def test_an_index_with_server_errors_and_one_without_the_package(
    status: int,
    kind: type[RondoError],
    message: str,
    index: Callable[[str], None],
    status_server: Callable[..., str],
) -> None:
    index(status_server(status))
    with pytest.raises(kind, match=f"(?s)small==1.0: pip could not .*{message}"):
        fetch(Package("small==1.0", HELLO))
