"""Rondo's own pages on the Prefect server of `rondo up`: login, all runs, reports.

Reports contain texts of models. Those are escaped; if one were not, it would run as a script with
the rights of Prefect's pages, which can start code. So every page but the login is in the sandbox
of its Content-Security-Policy: its origin is none, and it can reach neither the local storage nor
any server. The browser counts a link of such a page as one of another site, so that the cookie is
SameSite=Lax: Strict would log the reader out at each link. All that the cookie gives is reading.
"""

from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flows.core.login import Login, headers, logged_out
from flows.report import run_pages, run_record

# Vega, which draws the charts, makes functions from text
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; connect-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts allow-downloads "
    "allow-popups allow-popups-to-escape-sandbox allow-top-navigation-by-user-activation"
)
TYPES = {".html": "text/html; charset=utf-8", ".md": "text/plain; charset=utf-8"}


def router(home: Path, port: int, auth: str) -> APIRouter:
    """The pages of a server.

    Args:
        home: the .rondo folder.
        port: of the server. A browser sends a cookie to all ports of a host, so its name has it.
        auth: what Prefect's API asks for; without one nobody can log in.
    """
    login = Login(port, auth, "/deployments")
    own = login.router()

    @own.get(run_pages.RUNS_PATH)
    def runs(request: Request) -> Response:
        if not login.accepted(request):
            return logged_out()
        return HTMLResponse(run_pages.page(home), headers=headers(POLICY))

    @own.get(run_pages.REPORT_PATH + "/{run}")
    def report(run: str) -> RedirectResponse:
        return RedirectResponse(f"{run_pages.REPORT_PATH}/{run}/{run_pages.REPORT_NAME}")

    @own.get(run_pages.REPORT_PATH + "/{run}/{name:path}")
    def report_page(request: Request, run: str, name: str) -> Response:
        if not login.accepted(request):
            return logged_out()
        return page_of_run(home, run, name)

    return own


def page_of_run(home: Path, run: str, name: str) -> Response:
    """A kept page. Names are compared with those that exist: none becomes a path.

    Raises:
        HTTPException: there is no such page.
    """
    folders = {folder.name: folder for folder in (home / run_record.KEPT).glob("*")}
    path = run_record.pages(folders[run]).get(name) if run in folders else None
    if path is None:
        raise HTTPException(404, "no such page is kept of this run: /rondo/runs lists all runs")
    sent = headers(POLICY) | {"Content-Type": TYPES[path.suffix]}
    return Response(path.read_bytes(), headers=sent)
