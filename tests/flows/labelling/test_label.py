"""`rondo label`: what is sent, kept and reported, and a session of 60 in a browser."""

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect

from flows.core.login import Login
from flows.labelling.pages import PATH, make_app
from flows.labelling.session import Answer, Session, sides
from flows.report import people
from flows.report.people import Of, Verdict
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_jsonl, write_text
from stages.replay.badcases import Badcase, Report, ledger_path, read_user_rows
from tests.browser import open_page, scripts_of_texts, shot
from tests.paths import ROOT

EVIL = "</script><img src=x onerror=alert(1)> {{ 7 * 7 }} <b>bold</b>"
AUTH, COUNT = "rondo:planted-string", 60


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With 70 evaluated prompts, and two badcases."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("params.yaml"), "rounds: {r0: {previous: assets/start}}")
    write_text(Path("dvc.yaml"), "")
    rows = [
        {"id": f"q{i}", "sample": 0, "prompt": f"Prompt {i}", "sft": f"of SFT {i}"}
        | {"ppo": EVIL if i == 7 else f"of PPO {i}", "ppo_against_sft": float(i % 3 > 0)}
        for i in range(70)
    ]
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", rows)
    cases = [
        Badcase(
            **{"id": name, "round": "r0", "cause": "no_eos", "policy": "abc", "origin": "fresh"},
            **{"prompt_id": name, "prompt": f"Prompt of {name}", "response": f"bad {name}"},
            **{"score": 1.0, "repetition": 0.0, "sft": f"fine {name}"},
        ).model_dump(mode="json")
        for name in ("c1", "c2")
    ]
    write_jsonl(ledger_path("r0"), cases)
    return tmp_path


def choose(session: Session, wanted: str, by: str = "Ann", **reason: str) -> dict[str, Any]:
    """Answer for the response of this model (or a tie ...); what is next."""
    following = session.following(by)
    comparison = session.by_id[following["id"]]
    if wanted in comparison.names:
        left = comparison.names[sides(comparison, by)[0]]
        wanted = "left" if wanted == left else "right"
    return session.answer(Answer(id=following["id"], by=by, choice=wanted, **reason))


@pytest.mark.usefixtures("project")
def test_a_verdict_is_kept_with_its_texts_and_undone() -> None:
    session = Session("r0", Of.evaluation, 10)
    assert choose(session, "ppo", cause="style", note=" long ")["done"] == 1
    assert choose(session, "sft")["done"] == 2
    assert choose(session, "both_bad")["done"] == 3
    first, second, third = people.read_labels("r0")
    assert [one.verdict for one in (first, second, third)] == [
        Verdict.first,
        Verdict.second,
        Verdict.both_bad,
    ]
    assert first.names == ("ppo", "sft") and first.texts == session.comparisons[0].texts
    assert (first.by, first.cause, first.note) == ("Ann", "style", "long")
    again = session.undo("Ann")
    assert again["done"] == 2 and again["id"] == third.id
    assert session.undo("Bo")["done"] == 0 and len(people.read_labels("r0")) == 2
    assert Session("r0", Of.evaluation, 10).following("Ann")["id"] == third.id  # after closing


@pytest.mark.usefixtures("project")
def test_the_page_learns_no_model_and_the_sides_are_drawn() -> None:
    session = Session("r0", Of.evaluation, 70)
    following = session.following("Ann")
    assert {*following} == {"done", "total", "id", "prompt", "left", "right"}
    drawn = {by: [sides(one, by)[0] for one in session.comparisons] for by in ("Ann", "Bo")}
    for left in drawn.values():
        assert 20 <= sum(left) <= 50  # of 70 by a coin: 35, standard deviation 4.2
    assert drawn["Ann"] != drawn["Bo"]
    assert drawn["Ann"] == [sides(one, "Ann")[0] for one in session.comparisons]


@pytest.mark.usefixtures("project")
def test_two_answers_of_one_person_are_one_label() -> None:
    """Of a page in two tabs the last one counts."""
    session = Session("r0", Of.evaluation, 10)
    number = session.following("Ann")["id"]
    for choice in ("left", "tie"):
        session.answer(Answer(id=number, by="Ann", choice=choice))
    [label] = people.read_labels("r0")
    assert label.verdict is Verdict.tie
    with pytest.raises(BadInput, match="no such comparison"):
        session.answer(Answer(id="0", by="Ann", choice="left"))


@pytest.mark.usefixtures("project")
def test_lost_badcases_become_reports_with_the_better_response() -> None:
    session = Session("r0", Of.badcases, 10)
    choose(session, "sft", cause="cut off", note="no end")
    choose(session, "both_bad")
    assert "2 added" in session.finish("Ann")[-1] and "2 known" in session.finish("Ann")[-1]
    rows = [row for _, row in read_user_rows("r0") if isinstance(row, Report)]
    first, second = (one.texts for one in session.comparisons)
    assert [(row.response, row.better, row.note) for row in rows] == [
        (first[0], first[1], "cut off: no end"),
        (second[0], None, None),
    ]
    assert {row.by for row in rows} == {"Ann"}


@pytest.mark.usefixtures("project")
def test_verdicts_on_frozen_prompts_become_no_training_data() -> None:
    session = Session("r0", Of.evaluation, 2)
    choose(session, "sft")
    assert "win rate of ppo against sft 0.000" in session.finish("Ann")[0]
    assert not Path("badcases").exists()


@pytest.fixture
def client(project: Path) -> TestClient:
    app = make_app(Session("r0", Of.evaluation, COUNT), "Ann <b>", Login(8200, AUTH, PATH))
    return TestClient(app, "http://127.0.0.1:8200")


def test_without_login_nothing_is_shown_or_written(client: TestClient) -> None:
    assert "Log in first" in client.get(PATH).text
    for name in ("next", "answer", "undo", "finish"):
        assert client.post(f"{PATH}/{name}", json={"by": "Ann"}).status_code == 401
    assert PATH in client.get("/rondo").text  # to which the login leads
    assert client.post("/rondo/login", content="rondo:guessed").status_code == 403
    assert client.post("/rondo/login", content=AUTH).status_code == 204
    page = client.get(PATH)
    assert "Which response is better?" in page.text and "Ann &lt;b&gt;" in page.text
    assert "connect-src 'self'" in page.headers["Content-Security-Policy"]
    assert client.post(f"{PATH}/next", json={"by": "Ann"}).json()["total"] == COUNT


@pytest.mark.parametrize(
    "body",
    [
        {"by": " ", "id": "x", "choice": "left"},
        {"by": "a" * 101, "id": "x", "choice": "left"},
        {"by": "Ann", "id": "x", "choice": "ppo"},
        {"by": "Ann", "id": "x", "choice": "left", "note": "a" * 2001},
        {"by": "Ann", "id": "x", "choice": "left", "model": "ppo"},
        {"by": "Ann", "id": "no such", "choice": "left"},
        [],
    ],
)
def test_bad_answers_are_refused_and_write_nothing(client: TestClient, body: Any) -> None:
    client.post("/rondo/login", content=AUTH)
    refused = client.post(f"{PATH}/answer", json=body)
    assert refused.status_code in (400, 422) and refused.json()["detail"]
    assert people.read_labels("r0") == []


def test_a_large_request_is_not_read(client: TestClient) -> None:
    """Not even of somebody who has not logged in."""
    large = b"a" * (64 * 1024 + 1)
    assert client.post(f"{PATH}/answer", content=large).status_code == 413
    assert client.post(f"{PATH}/answer", content=iter([large])).status_code == 413
    assert client.post(f"{PATH}/answer", content=b"{}").status_code in (401, 422)


@pytest.fixture
def server(project: Path) -> "Iterator[subprocess.Popen[str]]":
    main = "from flows.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", main, "label", "r0", "--port", "0", "--by", "Ann"],
        cwd=project,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_a_session_of_sixty_in_a_browser(server: "subprocess.Popen[str]") -> None:
    """By keyboard and by mouse; closed and opened again; at a phone's width; roles for a screen
    reader; and no text of a model runs.
    """
    assert server.stdout is not None
    first_line = server.stdout.readline()
    link = re.search(r"http\S+", first_line)
    assert link and first_line.startswith(f"{COUNT} comparisons")
    with open_page() as page:
        if not page:
            pytest.skip("no browser")
        events = scripts_of_texts(page)
        page.goto(link[0])
        session = Session("r0", Of.evaluation, COUNT)
        names = [one.names[sides(one, "Ann")[0]] for one in session.comparisons]
        evil = [one.texts[0] for one in session.comparisons].index(EVIL)
        for number, left in enumerate(names):
            expect(page.get_by_role("status")).to_have_text(f"{number} of {COUNT}")
            if number == evil:
                side = "left" if left == "ppo" else "right"
                expect(page.locator(f"#{side}-text")).to_have_text(EVIL)
            if number == 20:  # closed, and opened again where it was
                page.reload()
                expect(page.get_by_role("status")).to_have_text(f"20 of {COUNT}")
            judge(page, number, left == "ppo")
        expect(page.get_by_role("region", name="Results")).to_contain_text(
            f"win rate of ppo against sft 1.000 [1.000, 1.000] in {COUNT - 1} comparisons"
        )
        shot(page, "label-results")
        assert events == []
    assert Counter(one.verdict for one in people.read_labels("r0")) == {
        Verdict.first: COUNT - 1,
        Verdict.skip: 1,
    }
    server.send_signal(signal.SIGINT)
    output = server.stdout.read()
    assert "win rate of ppo against sft 1.000" in output and "labels/r0.jsonl" in output


def judge(page: Page, number: int, ppo_is_left: bool) -> None:
    """For the policy: by mouse, on a phone, or by keyboard; the first verdict is undone, and the
    last comparison skipped.
    """
    side = "left" if ppo_is_left else "right"
    if number == 0:
        page.keyboard.press("t")
        expect(page.get_by_role("status")).to_have_text(f"1 of {COUNT}")
        page.keyboard.press("u")
        expect(page.get_by_role("status")).to_have_text(f"0 of {COUNT}")
        page.get_by_label("Note, optional").fill("typing t, b and s is no verdict")
        page.keyboard.press("Escape")
    if number == 10:
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shot(page, "label-phone")
    if number == COUNT - 1:
        page.get_by_role("button", name="Skip").click()
    elif number % 3:
        page.keyboard.press("ArrowLeft" if ppo_is_left else "ArrowRight")
    else:
        page.get_by_role("button", name=re.compile(f"^{side} is better", re.IGNORECASE)).click()
