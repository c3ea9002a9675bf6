"""What a person does with the report's charts, in Chromium. Without one, it is left out."""

from pathlib import Path

from playwright.sync_api import expect

from flows.report import page
from stages.lib.core.files import stage_dir, write_json, write_text
from tests.browser import look_at_the_report, open_page
from tests.flows.report.reading import all_ran

EVIL = "</script><script>alert(\"x\")</script> 'quoted'"
RATE = {"rate": 0.1, "low": 0.05, "high": 0.2, "pairs": 40}
NO_RATES = {"flips": {}, "endings": {}, "endings_text": [], "mined": {}, "mined_text": []}


def write_round(name: str) -> None:
    updates = "".join(f"{update},{update / 10},0.3\n" for update in range(1, 31))
    write_text(stage_dir(name, "ppo") / "curves.csv", f"step,kl,entropy\n{updates}")
    battery = NO_RATES | {"probes": {EVIL: RATE}, "accuracy": {}}
    write_json(stage_dir(name, "battery") / "metrics.json", battery)


def test_values_at_the_pointer_zoom_and_the_choice_of_rounds(project: Path) -> None:
    for name in ("r0", "r1"):
        write_round(name)
    report = page.write(["r0", "r1"], all_ran("r0", "r1")).absolute()
    with open_page() as shown:
        if not shown:
            return
        look_at_the_report(shown, report, "Curves")
        copy = shown.locator(".copy button").first
        copy.click()
        expect(copy).to_have_text("copied")
        rates, kl, _ = shown.locator(".plot").all()
        expect(rates.locator("text", has_text="quoted")).to_have_count(1)

        kl.scroll_into_view_if_needed()
        kl.hover()
        tip = shown.locator("#vg-tooltip-element")
        expect(tip).to_contain_text("nats")
        expect(tip).to_contain_text("training")
        lines = kl.locator(".mark-line path")
        expect(lines).to_have_count(2)
        shown.locator("input[value=r0]").uncheck()
        expect(lines).to_have_count(1)
        shown.mouse.wheel(0, 10)  # scrolls the page
        kl.scroll_into_view_if_needed()
        kl.hover()
        shown.keyboard.down("Control")
        shown.mouse.wheel(0, -300)
        shown.keyboard.up("Control")
        last_update = kl.locator(".role-axis-label text", has_text="30")
        expect(last_update).to_have_count(0)
        kl.dblclick()
        expect(last_update).to_have_count(1)
        shown.set_viewport_size({"width": 390, "height": 800})
        charts = shown.locator("section.charts")
        assert charts.evaluate("part => part.scrollWidth <= part.clientWidth")
