"""What a person does and sees in a browser: Prefect's pages, MLflow's, and the report, in Chromium:
the system's, or else Playwright's own. Without one, these steps are left out.
"""

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Dialog, Locator, Page, Response, expect, sync_playwright

from flows.core.services import HOST, MLFLOW_DATABASE, is_up, sqlite_uri
from flows.tracking.records import HEALTH
from tests.paths import ROOT
from tests.servers import free_port, request, until

SCREENSHOTS = ROOT / ".rondo/screenshots"
CHANGES = re.compile(r"/(create_flow_run|resume)$")  # the requests of the forms' Submit
ANSWER = re.compile("at fault|gate")  # in the heading of a report
PAGE_SECONDS = 90.0
expect.set_options(timeout=PAGE_SECONDS * 1000)


@contextmanager
def open_page() -> Iterator[Page | None]:
    """A page of a new browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    own = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        chromium = playwright.chromium
        if not own and not Path(chromium.executable_path).exists():
            advice = "install Debian's chromium, or run `playwright install chromium`"
            warnings.warn(f"no browser, so no page is looked at: {advice}", stacklevel=3)
            yield None
            return
        browser = chromium.launch(executable_path=own, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1400, "height": 1000})
        shown.set_default_timeout(PAGE_SECONDS * 1000)
        yield shown
        browser.close()


def scripts_of_texts(page: Page) -> list[str]:
    """The dialogs and errors from now on: what a text that runs as a script makes."""
    events: list[str] = []

    def dialog_opened(dialog: Dialog) -> None:
        events.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dialog_opened)
    page.on("pageerror", lambda error: events.append(str(error)))
    return events


def shot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


class Ui:
    """What a person does in Prefect's pages. address: of Prefect. api: with user and password."""

    def __init__(self, page: Page, address: str, api: str) -> None:
        self.page, self.address, self.api = page, address, api

    def log_in(self, link: str) -> None:
        """By the link of `rondo up`, without which a page shows nothing."""
        self.page.goto(f"{self.address}/deployments")
        expect(self.page).to_have_url(re.compile("/login"))
        self.page.goto(f"{self.address}/rondo/runs")
        expect(self.page.get_by_text("Log in first")).to_be_visible()
        self.page.goto(f"{self.address}/rondo#rondo:guessed")
        expect(self.page.get_by_text("not of this server")).to_be_visible()
        self.page.goto("about:blank")  # from which a link is another page
        self.page.goto(link)
        expect(self.page.get_by_text("rlhf-pipeline").first).to_be_visible()
        assert self.page.url == f"{self.address}/deployments"  # the string is in no history
        self.page.reload()  # and the browser keeps it
        expect(self.page.get_by_text("rlhf-pipeline").first).to_be_visible()

    def form(self, deployment: str) -> None:
        deployed = request(f"{self.api}/deployments/name/{deployment}/{deployment}")
        self.page.goto(f"{self.address}/deployments/deployment/{deployed['id']}/run")
        self.page.get_by_text("Validate parameters").wait_for()

    def fill(self, rounds: int, settings: tuple[str, ...]) -> None:
        """The form of rlhf-pipeline."""
        self.page.locator("input[type=number]").first.fill(str(rounds))
        for number, setting in enumerate(settings):
            fields = self.page.locator(".p-draggable-list textarea")
            if fields.count() <= number:
                self.page.get_by_role("button", name="Add item").first.click()
            fields.nth(number).fill(setting)

    def start(self, *settings: str) -> str:
        """A run of one round with the form's default, a folder of its own; returns its id.

        The form lists the keys of the settings, and refuses a bad value with the reason.
        """
        self.form("rlhf-pipeline")
        keys = "total_episodes, max_steps, num_ppo_epochs"
        expect(self.page.get_by_text(keys).first).to_be_visible()
        self.fill(-1, settings)
        self.submit(status=409)
        expect(self.page.get_by_text("-1 is less than the minimum of 0").first).to_be_visible()
        shot(self.page, "form")
        self.fill(1, settings)
        return str(self.submit().json()["id"])

    def submit(self, within: Page | Locator | None = None, status: int = 201) -> Response:
        """Click Submit (of the page, or of what is given); the server's answer has this status."""
        button = (within or self.page).get_by_role("button", name="Submit")
        with self.page.expect_response(lambda answer: bool(CHANGES.search(answer.url))) as caught:
            button.click()
        answer = caught.value
        assert answer.status == status, f"{answer.url}: {answer.status} {answer.text()}"
        return answer

    def open_run(self, run: str) -> None:
        self.page.goto(f"{self.address}/runs/flow-run/{run}")

    def approve(self, by: str, reason: str) -> None:
        self.page.get_by_role("button", name="Resume").click()
        modal = self.page.locator(".p-modal").last
        expect(modal).to_contain_text("The sft gate of r0 failed")
        modal.locator(".p-select-button__control").press("ArrowDown")
        self.page.get_by_role("option", name="approve").click()
        for number, text in enumerate((by, reason)):
            modal.locator("textarea").nth(number).fill(text)
        shot(self.page, "approve")
        self.submit(modal)

    def artifact(self, key: str) -> dict[str, Any]:
        newest = {"artifacts": {"key": {"any_": [key]}}}
        [artifact] = request(f"{self.api}/artifacts/latest/filter", newest)
        return dict(artifact)

    def look_at_artifacts(self, run: str, shown_by_key: dict[str, str]) -> None:
        """What the run's page shows of its stages, and the report to which its link leads."""
        self.open_run(run)
        self.page.get_by_text("Artifacts", exact=True).last.click()
        for key in ("report", "summary", "mlflow"):
            expect(self.page.get_by_text(key, exact=True).first).to_be_visible()
        shot(self.page, "artifacts")
        for key, shown in shown_by_key.items():
            self.look_at_artifact(self.artifact(key)["latest_id"])
            expect(self.page.get_by_text(shown).first).to_be_visible()
        self.look_at_artifact(self.artifact("report")["latest_id"])
        with self.page.context.expect_page() as opened:  # Prefect opens a tab
            self.page.get_by_role("link", name="Report: results").click()
        expect(opened.value.get_by_role("heading", level=1)).to_be_visible()
        assert self.page.evaluate("self.origin") == self.address
        assert opened.value.evaluate("self.origin") == "null"
        shot(opened.value, "report-of-a-run")
        opened.value.close()

    def heading(self, text: str) -> None:
        expect(self.page.get_by_role("heading", level=1)).to_contain_text(text)

    def look_at_all_runs(self, state: str) -> None:
        """Only after the login; in a page without an origin; and its links lead on and back."""
        self.page.goto(f"{self.address}/rondo/runs")
        self.heading("Runs of")
        expect(self.page.get_by_text(state).first).to_be_visible()
        shot(self.page, "runs")
        assert self.page.evaluate("self.origin") == "null"  # no script reaches Prefect's storage
        self.page.set_viewport_size({"width": 390, "height": 844})
        assert self.page.evaluate("document.documentElement.scrollWidth") <= 390
        self.page.emulate_media(color_scheme="dark")
        shot(self.page, "runs-phone-dark")
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size({"width": 1400, "height": 1000})
        self.page.get_by_role("link", name="report").first.click()
        expect(self.page).to_have_url(re.compile("/rondo/report/"))
        expect(self.page.get_by_role("heading", level=1)).to_be_visible()
        self.page.go_back()
        self.page.locator("th").get_by_role("link", name="Prefect").first.click()
        expect(self.page).to_have_url(re.compile("/runs/flow-run/"))
        self.page.context.clear_cookies()
        self.page.goto(f"{self.address}/rondo/runs")
        self.heading("Runs of")  # the string that Prefect's pages use logs in again

    def look_at_artifact(self, number: str) -> None:
        self.page.goto(f"{self.address}/artifacts/artifact/{number}")

    def look_at_a_picture(self, markdown: str) -> None:
        made = {"key": "pictures-test", "type": "markdown", "data": markdown}
        self.look_at_artifact(request(f"{self.api}/artifacts/", made)["id"])
        picture = self.page.locator("img").first
        expect(picture).to_be_visible()
        until(lambda: picture.evaluate("picture => picture.naturalWidth") > 0)
        shot(self.page, "pictures")


def look_at_the_report(page: Page, report: Path, text: str) -> None:
    """It asks the network for nothing, and its script draws all charts without an error."""
    requested_urls: list[str] = []
    errors: list[str] = []
    page.goto("about:blank")  # the page before may still ask for something
    page.on("request", lambda sent: requested_urls.append(sent.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(report.as_uri())
    expect(page.get_by_role("heading", level=1)).to_contain_text(ANSWER)
    expect(page.get_by_text(text).first).to_be_visible()
    expect(page.locator(".plot svg.marks")).to_have_count(page.locator(".plot").count())
    shot(page, "report")
    page.emulate_media(color_scheme="dark")
    shot(page, "report-dark")
    assert requested_urls == [report.as_uri()] and errors == []


def look_at_results(project: Path) -> None:
    """The report of the last run, and its pages in MLflow, of which all records are there."""
    with open_page() as page, mlflow_of(project / ".rondo" / MLFLOW_DATABASE) as address:
        if page:
            look_at_mlflow(page, address)
            look_at_the_report(page, project / "reports/report.html", "win rate against SFT")


@contextmanager
def mlflow_of(database: Path) -> Iterator[str]:
    """The address of a server of this database."""
    port = free_port()
    module = [sys.executable, "-m", "flows.tracking.mlflow_server", str(database), "server"]
    options = ["--backend-store-uri", sqlite_uri(database), "--host", HOST, "--port", port]
    with subprocess.Popen([*module, *options, "--workers", "1"], cwd=ROOT) as server:
        try:
            until(lambda: is_up(f"http://{HOST}:{port}/health"))
            yield f"http://{HOST}:{port}"
        finally:
            server.terminate()


def look_at_mlflow(page: Page, address: str) -> None:
    """Its pages for models, a comparison, and PPO's health in the pipeline run."""
    api = f"{address}/api/2.0/mlflow"
    rondo_only = {"max_results": 5, "filter": "name = 'rondo'"}
    [experiment] = request(f"{api}/experiments/search", rondo_only)["experiments"]
    number = experiment["experiment_id"]
    runs = request(f"{api}/runs/search", {"experiment_ids": [number]})["runs"]
    ids = {run["info"]["run_name"]: run["info"]["run_id"] for run in runs}
    of_pipeline = {"key": "rondo.address", "value": "pipeline"}
    [pipeline] = [run["info"]["run_id"] for run in runs if of_pipeline in run["data"]["tags"]]
    workflow = "workflowType=machine_learning"
    page.goto(f"{address}/#/experiments/{number}/models?{workflow}")
    expect(page.get_by_text("r0-ppo").first).to_be_visible()
    shot(page, "models")
    two = json.dumps([ids["sft@r0"], ids["evaluate@r0"]])
    page.goto(f'{address}/#/compare-runs?runs={two}&experiments=["{number}"]&{workflow}')
    expect(page.get_by_text("Comparing 2 Runs").first).to_be_visible()
    shot(page, "compare")
    page.set_viewport_size({"width": 1400, "height": 4000})  # charts are drawn where one looks
    page.goto(f"{address}/#/experiments/{number}/runs/{pipeline}/model-metrics")
    for name in HEALTH:
        expect(page.get_by_text(f"r0/{name}").first).to_be_visible()
    shot(page, "curves")
