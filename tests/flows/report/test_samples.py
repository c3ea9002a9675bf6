"""reports/<round>/samples.html: what it has, and how it works in Chromium."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from flows.report import page, samples
from flows.report.samples import marked_differences
from stages.lib.core.files import stage_dir, write_jsonl
from tests.browser import open_page, scripts_of_texts
from tests.flows.report.reading import Page, all_ran

EVIL = "</script><img src=x onerror=alert(1)>\" onmouseover='alert(2)' {{ 7 * 7 }} {% x %} --> <!--"


def row(number: int, policy: str, **numbers: float) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "How was it?"}]
    texts = {"base": "It is", "sft": "It was very good.", "ppo": policy, "champion": "It was."}
    return {"id": f"q{number}", "sample": 0, "prompt": prompt, **texts, **numbers}


ROWS = [
    row(
        *(0, "It was good!"),
        **{"sft_judge_score": 0.5, "ppo_judge_score": 0.25, "sft_score": 1.0, "ppo_score": 3.0},
        **{"ppo_against_sft": 0.0, "ppo_against_champion": 0.5, "ppo_kl": 2.5, "ppo_length": 9},
    ),
    row(
        *(1, "It was a very good day."),
        **{"sft_judge_score": 0.0, "ppo_judge_score": 0.75, "sft_score": 1.0, "ppo_score": 1.5},
        **{"ppo_against_sft": 1.0, "ppo_against_champion": 1.0, "ppo_kl": 7.5, "ppo_length": 12},
    ),
    row(2, EVIL),  # of an earlier version, or a judge without scores
]


@pytest.fixture
def path(project: Path) -> Path:
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", ROWS)
    samples.write("r0", all_ran("r0"))
    return project / samples.path_of("r0")


def test_the_page_has_all_samples_side_by_side(path: Path) -> None:
    text = path.read_text()
    html = Page(text)
    assert html.open_tags == [] and html.fetched == []
    visible = " ".join(html.words)
    assert [visible.count(f"q{number}-0") for number in range(3)] == [1, 1, 1]
    titles = [word for word in html.words if word in ("base", "SFT", "policy", "champion")]
    assert titles[2:] == ["base", "SFT", "policy", "champion"] * 3  # two in the first lines
    assert "judge 0.25, reward 3, KL 2.5, tokens 9" in visible
    assert "Human: How was it?" in visible and "lost against SFT" in visible
    assert "lost against SFT (1)" in visible and "reward up, judge down (1)" in visible
    assert text.count("<script>") == 1 and "<img" not in text and '" onmouse' not in text


def test_a_round_without_samples_has_no_page(path: Path) -> None:
    """That of an earlier run is removed."""
    (stage_dir("r0", "evaluate") / "samples.jsonl").unlink()
    samples.write("r0", all_ran("r0"))
    assert not path.exists()


def test_before_an_evaluation_the_page_has_the_samples_of_sft(path: Path) -> None:
    """Who has to mend SFT reads its texts."""
    evaluated = stage_dir("r0", "evaluate") / "samples.jsonl"
    evaluated.unlink()
    texts = {"base": "It is", "sft": EVIL}
    rows = [{"id": "q", "prompt": "How?", **texts, "outcome": outcome} for outcome in (0.0, 1.0)]
    write_jsonl(stage_dir("r0", "sft") / "samples.jsonl", [*rows, rows[0] | {"outcome": None}])
    samples.write("r0", all_ran("r0"))
    html = Page(path.read_text())
    visible = " ".join(html.words)
    assert html.open_tags == [] and html.words.count(EVIL.split(" ")[0]) == 0
    assert "q-0 lost against base" in visible and "q-1 won against base" in visible
    assert "q-2 How?" in " ".join(visible.split()) and "<img" not in path.read_text()
    write_jsonl(evaluated, ROWS)
    samples.write("r0", all_ran("r0"))
    assert "lost against SFT" in path.read_text()


def test_a_page_is_made_again_only_of_other_samples(path: Path) -> None:
    """Those of 30 ended rounds would take half a minute each time."""
    written = path.stat().st_ino  # a new file has another number
    samples.write("r0", all_ran("r0"))
    assert path.stat().st_ino == written
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", ROWS[:1])
    samples.write("r0", all_ran("r0"))
    assert path.stat().st_ino != written and "q1-0" not in path.read_text()


def test_words_that_only_one_text_has_are_marked() -> None:
    assert marked_differences("It was very good.\n", "It was <b> good. So\n") == (
        "It was <del>very </del>good.\n",
        "It was <ins>&lt;b&gt; </ins>good. <ins>So\n</ins>",
    )
    assert marked_differences("", "a") == ("", "<ins>a</ins>")
    long = "word " * samples.COMPARED_WORDS
    assert marked_differences(f"{long}a", f"{long}b") == (f"{long}a", f"{long}b")


def test_counts_of_the_report_and_its_links(path: Path, project: Path) -> None:
    text = page.write(["r0", "r1"], all_ran("r0", "r1")).read_text()
    assert re.search(r'<a href="r0/samples.html">All 3 samples</a>', text)
    assert re.search(r'<a href="r0/samples.html#show=lost">1 lost', text)
    assert re.search(r'<a href="r0/samples.html#sign=exploit">1\s+with reward up', text)
    assert "r1/samples.html" not in text


def test_one_page_that_fails_does_not_prevent_the_others(path: Path, project: Path) -> None:
    lines: list[str] = []
    write_jsonl(stage_dir("r0", "evaluate") / "samples.jsonl", [{"id": "of another version"}])
    write_jsonl(stage_dir("r1", "evaluate") / "samples.jsonl", ROWS)
    page.write_pages(["r0", "r1"], all_ran("r0", "r1"), lines.append)
    [line] = lines
    assert line.startswith("writing reports/r0/samples.html (`rondo report` tries again) failed")
    assert not path.exists() and samples.path_of("r1").exists()


def test_search_sort_and_filter_in_a_browser(path: Path) -> None:
    """No text of a model runs. The address keeps the choice."""
    with open_page() as browser:
        if not browser:
            pytest.skip("no browser")
        events = scripts_of_texts(browser)
        browser.on("request", lambda sent: events.append(sent.url))
        browser.goto(path.as_uri())
        entries, count = browser.locator(".entry:visible"), browser.locator("output")

        def shown() -> list[str]:
            return [
                text.split("-")[0].strip()
                for text in browser.locator(".entry:visible h2").all_text_contents()
            ]

        expect(count).to_have_text("3 of 3 shown")
        for text in entries.nth(2).locator(".text").all():
            text.hover()
        browser.locator("input").fill("VERY GOOD DAY")
        assert shown() == ["q1"]
        browser.locator("button").click()
        expect(count).to_have_text("3 of 3 shown")
        browser.locator("[name=sort]").select_option("-kl")
        assert shown() == ["q1", "q0", "q2"]
        browser.locator("[name=champion]").select_option("tied")
        assert shown() == ["q0"] and browser.url.endswith("#champion=tied&sort=-kl")
        for address, ids in {
            "show=lost": ["q0"],
            "show=won": ["q1"],
            "sign=exploit": ["q0"],
            "sort=length": ["q0", "q1", "q2"],
            "show=nonsense&x=y": ["q0", "q1", "q2"],
        }.items():
            browser.goto(f"{path.as_uri()}#{address}")
            expect(count).to_have_text(f"{len(ids)} of 3 shown")
            assert shown() == ids
        browser.set_viewport_size({"width": 390, "height": 800})
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert set(events) <= {event for event in events if event.startswith(path.as_uri())}
