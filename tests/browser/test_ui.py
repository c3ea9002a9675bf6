"""Runs as a person starts, watches, approves and cancels them: Prefect, MLflow and the report in
Chromium, on the tiny model.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from flows.core.services import last_servers
from flows.execution import fork_server
from flows.execution.dvc_stages import command_environment
from flows.tracking.records import HEALTH
from tests.chromium import CHROMIUM, launch
from tests.clones import clone_of_working_tree
from tests.paths import ROOT
from tests.servers import free_port, of_project, prefect_api, read_until, request, until

SCREENSHOTS = ROOT / ".rondo/screenshots"
WORKSPACES = ".rondo/workspaces"  # of a clone
CHANGES = re.compile(r"/(create_flow_run|resume)$")  # the requests of the forms' Submit
RUN_SECONDS = 600.0  # generous: the question is whether it ends, not how fast
PAGE_SECONDS = 90.0
expect.set_options(timeout=PAGE_SECONDS * 1000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        if not CHROMIUM and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(
                "no browser: install Debian's chromium, or run `playwright install chromium`"
            )
        running = launch(playwright)
        yield running
        running.close()


@dataclass
class Servers:
    """`rondo up` in a clone of the working tree, the addresses of Prefect, its API (with user and
    password) and MLflow, and the link that `rondo up` prints for the browser.
    """

    clone: Path
    prefect: str
    api: str
    mlflow: str
    link: str


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
    copy_tables: Callable[[Path], None],
    forking_python: str,
) -> Iterator[Servers]:
    """Started once, since its start takes half a minute."""
    clone = clone_of_working_tree(tmp_path_factory.mktemp("browser") / "clone")
    copy_tables(clone)
    environment = command_environment() | {
        "PREFECT_SERVER_API_PORT": free_port(),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "MLFLOW_PORT": free_port(),
        "PYTHONPATH": str(clone),
        "PWD": str(clone),
        fork_server.VARIABLE: forking_python,
    }
    command = [sys.executable, "-m", "flows.cli", "up"]
    server = subprocess.Popen(
        command, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        link = re.search(r"http://\S+#\S+", read_until(server, "Ctrl-C"))
        assert link
        last = last_servers(clone / ".rondo")
        yield Servers(clone, last.prefect, prefect_api(clone), last.mlflow, link[0])
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


@pytest.fixture
def stranger(browser: Browser) -> Iterator[Page]:
    """A browser that has not used the link."""
    shown = browser.new_page(viewport={"width": 1400, "height": 1000})
    shown.set_default_timeout(PAGE_SECONDS * 1000)
    yield shown
    shown.close()


@pytest.fixture
def page(stranger: Page, servers: Servers) -> Iterator[Page]:
    """A browser that has."""
    stranger.goto(servers.link)
    stranger.wait_for_url(f"{servers.prefect}/deployments")
    yield stranger
    shot(stranger, "end")


def shot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def workspaces(clone: Path) -> set[Path]:
    """The worktrees of the runs so far."""
    return set((clone / WORKSPACES).glob("*"))


class Ui:
    """What a person does in Prefect's pages."""

    def __init__(self, page: Page, servers: Servers) -> None:
        self.page, self.address, self.api = page, servers.prefect, servers.api

    def form(self, deployment: str) -> None:
        deployed = request(f"{self.api}/deployments/name/{deployment}/{deployment}")
        self.page.goto(f"{self.address}/deployments/deployment/{deployed['id']}/run")
        self.page.get_by_text("Validate parameters").wait_for()

    def fill(self, settings: list[str]) -> None:
        """The form of rlhf-pipeline, for the tiny model and as many rounds as it has."""
        self.page.locator(".p-select-button__control").press("ArrowDown")
        self.page.get_by_role("option", name="tiny").click()
        for number, setting in enumerate(settings):
            self.page.get_by_role("button", name="Add item").first.click()
            self.page.locator(".p-draggable-list textarea").nth(number).fill(setting)

    def rounds(self, number: int) -> None:
        self.page.locator("input[type=number]").first.fill(str(number))

    def submit(self, within: Page | Locator | None = None, status: int = 201) -> None:
        """Click Submit (of the page, or of what is given), and compare the server's answer."""
        button = (within or self.page).get_by_role("button", name="Submit")
        with self.page.expect_response(lambda answer: bool(CHANGES.search(answer.url))) as caught:
            button.click()
        answer = caught.value
        assert answer.status == status, f"{answer.url}: {answer.status} {answer.text()}"

    def open_newest(self) -> str:
        """The page of the newest run; returns its id."""
        until(lambda: self.runs())
        newest: str = self.runs()[0]["id"]
        self.page.goto(f"{self.address}/runs/flow-run/{newest}")
        return newest

    def runs(self) -> list[dict[str, Any]]:
        return list(request(f"{self.api}/flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC"}))

    def artifact(self, key: str) -> dict[str, Any]:
        [flow_run] = request(
            f"{self.api}/artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}}
        )
        return dict(flow_run)

    def state(self, run: str) -> str:
        return str(request(f"{self.api}/flow_runs/{run}")["state_name"])

    def becomes(self, run: str, state: str) -> None:
        """Waits until the run's state is this, on the page too."""
        address = self.page.url
        # the run's picture, drawn anew all the time, takes the CPU that the run needs
        self.page.goto("about:blank")
        until(lambda: self.state(run) in (state, "Failed", "Crashed"), RUN_SECONDS, pause=1.0)
        self.page.goto(address)
        expect(self.page.get_by_text(state, exact=True).first).to_be_visible()

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


def test_a_browser_logs_in_by_the_link(servers: Servers, stranger: Page) -> None:
    stranger.goto(f"{servers.prefect}/deployments")
    expect(stranger).to_have_url(re.compile("/login"))
    stranger.goto(servers.link)
    expect(stranger.get_by_text("rlhf-pipeline").first).to_be_visible()
    assert stranger.url == f"{servers.prefect}/deployments"  # the string is in no history
    stranger.reload()  # and the browser keeps it
    expect(stranger.get_by_text("rlhf-pipeline").first).to_be_visible()


def test_a_run_from_the_form_to_the_report(
    servers: Servers, page: Page, forking_python: str
) -> None:
    clone, ui = servers.clone, Ui(page, servers)

    earlier, runs_before = workspaces(clone), ui.runs()
    # a bad value is refused in the form, with the reason; the form lists the keys of the settings
    ui.form("rlhf-pipeline")
    expect(page.get_by_text("total_episodes, max_steps, num_ppo_epochs").first).to_be_visible()
    ui.fill(["gates.sft.policy=ask"])
    ui.rounds(-1)
    ui.submit(status=409)
    expect(page.get_by_text("-1 is less than the minimum of 0").first).to_be_visible()
    shot(page, "form")
    assert ui.runs() == runs_before

    # a gate that asks suspends the run; a person approves, and it goes on to its end
    ui.rounds(1)
    ui.submit()
    run = ui.open_newest()
    ui.becomes(run, "Suspended")
    ui.approve("Ada", "the tiny model learns nothing, and need not")
    ui.becomes(run, "Completed")
    [folder] = workspaces(clone) - earlier
    verdict = json.loads((folder / "reports/r0/gate_sft.json").read_text())
    assert verdict["may_continue"] and (
        verdict["approval"]["by"],
        verdict["approval"]["approved"],
    ) == (
        "Ada",
        True,
    )

    # its branch, cloned: nothing is left to compute, nothing differs
    fresh = clone / ".rondo/fresh"
    git = ["git", "-C", str(fresh)]
    subprocess.run(
        ["git", "clone", "-q", "--branch", f"runs/{folder.name}", str(clone), str(fresh)],
        check=True,
    )
    (fresh / ".dvc/config.local").write_text(f"[cache]\n    dir = {clone / '.dvc/cache'}\n")
    done = subprocess.run(
        [forking_python, "-m", "dvc", "repro"],
        cwd=fresh,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"Running stage '(.*)'", done.stdout) == ["inputs"]  # which always looks
    assert (
        subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
        == ""
    )

    look_at_artifacts(page, ui, run)
    look_at_mlflow(page, servers.mlflow, folder.name)
    look_at_the_report(page, folder / "reports/report.html")


def test_a_run_that_is_cancelled_ends_its_stage(servers: Servers, page: Page) -> None:
    clone, ui = servers.clone, Ui(page, servers)
    earlier = workspaces(clone)
    ui.form("rlhf-pipeline")
    ui.fill(["sft.num_train_epochs=100000", "sft.max_steps=null"])  # does not end by itself
    ui.submit()
    page.goto("about:blank")  # its animated page takes the CPU that the run needs
    until(lambda: of_project(clone / WORKSPACES, "stages.sft"), RUN_SECONDS, pause=1.0)
    run = ui.open_newest()
    page.get_by_role("button", name="Cancel").first.click()
    page.locator(".p-modal").get_by_role("button", name="Confirm").click()
    until(lambda: not of_project(clone / WORKSPACES))
    ui.becomes(run, "Cancelled")
    [folder] = workspaces(clone) - earlier
    assert (folder / "params.yaml").read_text() != (
        clone / "params.yaml"
    ).read_text()  # it stays, for Retry


def look_at_artifacts(page: Page, ui: Ui, run: str) -> None:
    """What the run's page shows of its stages, a picture, and the report that MLflow keeps."""
    page.goto(f"{ui.address}/runs/flow-run/{run}")
    page.get_by_text("Artifacts", exact=True).last.click()
    for key in ("report", "summary", "mlflow"):
        expect(page.get_by_text(key, exact=True).first).to_be_visible()
    shot(page, "artifacts")
    for key, shown in (
        ("samples-evaluate-r0", "tweet-"),
        ("gate-promote-r0", "evaluate.win_rate_low"),
        ("progress-sft-r0", "sft@r0: done"),
    ):
        page.goto(f"{ui.address}/artifacts/artifact/{ui.artifact(key)['latest_id']}")
        expect(page.get_by_text(shown).first).to_be_visible()
    page.goto(f"{ui.address}/artifacts/artifact/{ui.artifact('pictures-ppo-r0')['latest_id']}")
    expect(page.locator("img").first).to_be_visible()
    until(lambda: page.locator("img").first.evaluate("picture => picture.naturalWidth") > 0)
    shot(page, "pictures")
    link = re.search(r"\((\S+)\)", ui.artifact("report")["data"])
    assert link
    page.goto(link[1])
    expect(page.frame_locator("iframe").get_by_role("heading", level=1)).to_contain_text(
        "Which is at fault"
    )
    shot(page, "report-in-mlflow")


def look_at_mlflow(page: Page, address: str, run: str) -> None:
    """Its pages for models, a comparison, and PPO's health in the pipeline run."""
    [experiment] = request(
        f"{address}/api/2.0/mlflow/experiments/search",
        {"max_results": 5, "filter": "name = 'rondo'"},
    )["experiments"]
    number = experiment["experiment_id"]
    results = request(
        f"{address}/api/2.0/mlflow/runs/search",
        {"experiment_ids": [number], "filter": f"tags.`rondo.run` = '{run}'"},
    )["runs"]
    ids = {result["info"]["run_name"]: result["info"]["run_id"] for result in results}
    page.goto(f"{address}/#/experiments/{number}/models?workflowType=machine_learning")
    expect(page.get_by_text("r0-ppo").first).to_be_visible()
    shot(page, "models")
    two = json.dumps([ids["sft@r0"], ids["evaluate@r0"]])
    compared = f'runs={two}&experiments=["{number}"]'
    page.goto(f"{address}/#/compare-runs?{compared}&workflowType=machine_learning")
    expect(page.get_by_text("Comparing 2 Runs").first).to_be_visible()
    shot(page, "compare")
    page.goto(f"{address}/#/experiments/{number}/runs/{ids[run]}/model-metrics")
    for name in HEALTH:
        expect(page.get_by_text(f"r0/{name}").first).to_be_visible()
    shot(page, "curves")


def look_at_the_report(page: Page, report: Path) -> None:
    """It asks the network for nothing, and its script, if any, has no error."""
    requested_urls: list[str] = []
    errors: list[str] = []
    page.on("request", lambda sent: requested_urls.append(sent.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    expect(page.get_by_role("heading", level=1)).to_contain_text("Which is at fault")
    expect(page.get_by_text("approved by Ada").first).to_be_visible()
    shot(page, "report")
    page.emulate_media(color_scheme="dark")
    shot(page, "report-dark")
    assert requested_urls == [report.as_uri()] and errors == []
