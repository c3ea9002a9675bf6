"""reports/badcases.html: each badcase, its retests, and the rows that were made of it."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from flows.report import badcases, page
from stages.lib.core.files import stage_dir, write_jsonl
from stages.replay.badcases import Badcase, Retest, ledger_path
from tests.browser import open_page, scripts_of_texts
from tests.flows.report.reading import Page, all_ran
from tests.flows.report.test_samples import EVIL

CASE = {"prompt_id": "p", "prompt": "The dinner", "score": 1.5, "kl": 3.0, "repetition": 0.0}
CASES = [
    Badcase(
        **CASE,
        **{"id": "aa11", "round": "r0", "cause": "judge_loses", "state": "repaired", "origin": 4},
        **{"response": " was bad", "better": " was good", "votes": {"together": 0.0}},
        tries=[
            Retest(round="r0", fired=3, of=4, ranked=True),
            Retest(round="r1", fired=0, of=4, ranked=False),
        ],
    ),
    Badcase(
        **CASE,
        **{"id": "bb22", "round": "r1", "cause": "human", "origin": EVIL, "note": EVIL},
        **{"response": EVIL, "better": EVIL, "sft": EVIL, "exploits": [EVIL]},
    ),
]


@pytest.fixture
def path(project: Path) -> Path:
    write_jsonl(ledger_path("r0"), [])
    write_jsonl(ledger_path("r1"), [case.model_dump(mode="json") for case in CASES])
    made = {"id": "replay-aa11", "prompt": "The dinner", "badcase": "aa11"}
    pair = made | {"chosen": " was good", "rejected": " was bad"}
    own = {"id": "own", "prompt": 'A "badcase"', "chosen": "x", "rejected": "y"}
    for name, pairs in (("r1", [own, pair, pair]), ("r2", [pair])):
        data = stage_dir(name, "prepare") / "data"
        write_jsonl(data / "pairs_train.jsonl", pairs)
        write_jsonl(data / "sft_train.jsonl", [made | {"completion": " was good"}])
    badcases.write(["r0", "r1", "r2"], all_ran("r0", "r1", "r2"))
    return project / badcases.PAGE


def test_the_page_has_everything_of_each_badcase(path: Path) -> None:
    text = path.read_text()
    html = Page(text)
    assert html.open_tags == [] and html.fetched == []
    visible = " ".join(" ".join(html.words).split())
    assert "Response of r0's policy, at update 4 of its training" in visible
    assert "reward 1.5, KL 3, jury: loses" in visible
    retests = "r0: 3 of 4 failed; r1: 0 of 4 failed, and the reward model prefers the bad response."
    assert retests in visible
    # what prepare put into the training sets, not what replay proposed
    assert "pair; copies per round: r1: 2, r2: 1" in visible
    assert "demonstration; copies per round: r1: 1, r2: 1" in visible
    assert visible.count("None in the training sets of this folder.") == 1
    assert text.count("<script>") == 1 and "<img" not in text and '" onmouse' not in text


def test_the_report_links_to_each_badcase_and_to_each_number_of_the_table(path: Path) -> None:
    links = Page(page.write(["r0", "r1"], all_ran("r0", "r1")).read_text()).links
    wanted = ["", "#aa11", "#state=repaired", "#cause=human", "#round=r1"]
    assert {f"badcases.html{part}" for part in wanted} <= set(links)
    assert "badcases.html#state=repaired&cause=judge_loses" in links


def test_without_a_ledger_there_is_no_page(path: Path) -> None:
    """That of an earlier run is removed."""
    badcases.write(["r0"], {})
    assert not path.exists()


def test_a_link_opens_one_badcase_in_a_browser(path: Path) -> None:
    """No text of a model runs."""
    with open_page() as browser:
        if not browser:
            pytest.skip("no browser")
        events = scripts_of_texts(browser)
        browser.goto(f"{path.as_uri()}#bb22")
        expect(browser.get_by_text("SFT's response").first).to_be_visible()
        assert browser.locator("details[open]").evaluate_all("all => all.map(one => one.id)") == [
            "bb22"
        ]
        browser.goto(f"{path.as_uri()}#cause=human&round=r0")
        expect(browser.locator("output")).to_have_text("0 of 2 shown")
        browser.locator("[name=round]").select_option("")
        expect(browser.locator("output")).to_have_text("1 of 2 shown")
        browser.set_viewport_size({"width": 390, "height": 800})
        assert browser.evaluate("document.documentElement.scrollWidth") == 390 and events == []
