"""Rondo's own pages: who gets them, and what they may do in a browser."""

import hashlib
import hmac
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from flows.orchestration.own_pages import router
from stages.lib.core.files import write_text

AUTH, PORT, RUN = "rondo:planted-string", 4200, "20261129-214513-71e0f8ea"
REPORT = f"/rondo/report/{RUN}/report.html"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With one kept report, and files that no page may give away."""
    home = tmp_path / ".rondo"
    kept = home / "reports" / RUN
    write_text(kept / "report.html", "<h1>The report</h1>")
    write_text(kept / "summary.md", "<b>no HTML</b>")
    write_text(kept / "r0/data.html", "<h1>Data</h1>")
    write_text(kept / "run.json", "{}")
    write_text(home / "servers.json", AUTH)
    write_text(tmp_path / "report.html", "outside")
    (kept / "link.html").symlink_to(tmp_path / "report.html")
    return home


def browser(home: Path, auth: str = AUTH) -> TestClient:
    app = FastAPI()
    app.router.routes[:0] = router(home, PORT, auth).routes
    return TestClient(app, f"http://127.0.0.1:{PORT}")


@pytest.fixture
def client(home: Path) -> TestClient:
    return browser(home)


def test_the_string_gives_a_cookie_and_the_cookie_the_pages(client: TestClient) -> None:
    for path in ("/rondo/runs", REPORT, f"/rondo/report/{RUN}", "/rondo/report/no/such.html"):
        refused = client.get(path)
        assert refused.status_code == 401 and "Log in first" in refused.text
        assert "The report" not in refused.text
    assert client.post("/rondo/login", content="rondo:guessed").status_code == 403
    assert client.get(REPORT).status_code == 401
    accepted = client.post("/rondo/login", content=AUTH)
    assert accepted.status_code == 204
    cookie, *attributes = accepted.headers["Set-Cookie"].split("; ")
    # by hand: no browser, and no other port of this machine, learns the string from the value
    value = hmac.new(AUTH.encode(), b"Rondo's own pages", hashlib.sha256).hexdigest()
    assert cookie == f"rondo-4200={value}"
    assert {"HttpOnly", "Path=/rondo", "SameSite=lax"} <= {*attributes}
    assert client.get(REPORT).text == "<h1>The report</h1>"
    assert client.get(f"/rondo/report/{RUN}").text == "<h1>The report</h1>"  # sent on
    assert "No run has started yet" in client.get("/rondo/runs").text


@pytest.mark.parametrize("value", ["", "0" * 64, "é"])
def test_another_cookie_is_no_login(client: TestClient, value: str) -> None:
    sent = client.get(REPORT, headers={"Cookie": f"rondo-4200={value}".encode("latin-1")})
    assert sent.status_code == 401


def test_without_a_string_nobody_logs_in(home: Path) -> None:
    """Prefect's API is then open, to this machine; reports stay closed."""
    client = browser(home, auth="")
    assert client.post("/rondo/login", content="").status_code == 403
    value = hmac.new(b"", b"Rondo's own pages", hashlib.sha256).hexdigest()
    assert client.get(REPORT, headers={"Cookie": f"rondo-4200={value}"}).status_code == 401


def test_a_long_string_is_not_read_to_its_end(client: TestClient) -> None:
    assert client.post("/rondo/login", content=b"a" * 2000).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        f"{RUN}/run.json",  # no page
        f"{RUN}/link.html",  # leads out of the folder
        f"{RUN}/r0",
        f"{RUN}/",
        f"{RUN}/../../servers.json",
        f"{RUN}/..%2F..%2Fservers.json",
        f"{RUN}/%2E%2E/%2E%2E/%2E%2E/report.html",
        "..%2F..%2F/report.html",
        "../report.html",
        "%2E%2E/servers.json",
        f"/etc/passwd/{RUN}",
        "*/report.html",
    ],
)
def test_no_other_file_is_a_page(client: TestClient, path: str) -> None:
    client.post("/rondo/login", content=AUTH)
    answer = client.get(f"/rondo/report/{path}")
    assert answer.status_code == 404
    assert AUTH not in answer.text and "outside" not in answer.text


def test_a_page_has_no_origin_and_no_network(client: TestClient) -> None:
    client.post("/rondo/login", content=AUTH)
    types = {"report.html": "text/html", "r0/data.html": "text/html", "summary.md": "text/plain"}
    for name, type_ in types.items():
        headers = client.get(f"/rondo/report/{RUN}/{name}").headers
        assert headers["Content-Type"] == f"{type_}; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"].split("; ")
        assert "default-src 'none'" in policy and "connect-src 'none'" in policy
        assert "script-src 'unsafe-inline' 'unsafe-eval'" in policy
        [sandbox] = [part.split() for part in policy if part.startswith("sandbox")]
        assert "allow-scripts" in sandbox and "allow-same-origin" not in sandbox
    policy = client.get("/rondo/runs").headers["Content-Security-Policy"]
    assert "sandbox" in policy and "allow-same-origin" not in policy
