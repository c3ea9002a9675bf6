"""Rondo's own pages on the Prefect server of `rondo up`: login, all runs, reports.

The page /rondo#STRING logs a browser in. A browser sends what follows the # to no server, and the
page leaves no entry in the browser's history. It puts the string where Prefect's pages look for it,
the local storage, and posts it to /rondo/login, which answers with a cookie for Rondo's own pages.

Reports contain texts of models. Those are escaped; if one were not, it would run as a script with
the rights of Prefect's pages, which can start code. So every page but the login is in the sandbox
of its Content-Security-Policy: its origin is none, and it can reach neither the local storage nor
any server. The browser counts a link of such a page as one of another site, so that the cookie is
SameSite=Lax: Strict would log the reader out at each link. All that the cookie gives is reading.
"""

import hashlib
import hmac
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flows.report import run_pages, run_record

LOGIN_PATH = "/rondo/login"
COOKIE_SECONDS = 400 * 24 * 3600  # the most that browsers keep
MAX_STRING_BYTES = 1000
KEY = "prefect-password"  # of Prefect's pages in the local storage
LOG_IN = f"""<!DOCTYPE html><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Rondo</title><body>
<script>
async function logIn(string) {{
  const answer = await fetch("{LOGIN_PATH}", {{method: "POST", body: string}})
  return answer.ok
}}
</script>
"""
LOGIN_PAGE = f"""{LOG_IN}<p hidden>This link is not of this server: <code>rondo up</code> prints the
link that logs this browser in.</p><script>
const string = location.hash.slice(1)
history.replaceState(null, "", location.pathname)
logIn(string).then(accepted => {{
  if (!accepted) return document.querySelector("p").hidden = false
  localStorage.setItem("{KEY}", btoa(string))
  location.replace("/deployments")
}})
</script>"""
# A browser that logged in to Prefect gets the cookie without a click
LOGGED_OUT_PAGE = f"""{LOG_IN}<p hidden>Log in first: open the link that <code>rondo up</code>
prints, then this page again.</p><script>
const stored = localStorage.getItem("{KEY}")
const tryStored = async () => {{
  if (stored && await logIn(atob(stored)) && (await fetch(location.href)).status !== 401)
    location.reload()
  else document.querySelector("p").hidden = false  // also if the browser keeps no cookie
}}
tryStored()
</script>"""
LOGIN_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# Vega, which draws the charts, makes functions from text
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; connect-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts allow-downloads "
    "allow-popups allow-popups-to-escape-sandbox allow-top-navigation-by-user-activation"
)
TYPES = {".html": "text/html; charset=utf-8", ".md": "text/plain; charset=utf-8"}


def headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def router(home: Path, port: int, auth: str) -> APIRouter:
    """The pages of a server.

    Args:
        home: the .rondo folder.
        port: of the server. A browser sends a cookie to all ports of a host, so its name has it.
        auth: what Prefect's API asks for; without one nobody can log in.
    """
    cookie, value = f"rondo-{port}", cookie_value(auth)
    own = APIRouter()

    def has_logged_in(request: Request) -> bool:
        sent = request.cookies.get(cookie, "")
        return bool(auth) and hmac.compare_digest(sent.encode(), value.encode())

    @own.get("/rondo")
    def login_page() -> HTMLResponse:
        return HTMLResponse(LOGIN_PAGE, headers=headers(LOGIN_POLICY))

    @own.post(LOGIN_PATH)
    async def log_in(request: Request) -> Response:
        string = b""
        async for chunk in request.stream():
            string += chunk
            if len(string) > MAX_STRING_BYTES:
                raise HTTPException(413)
        if not auth or not hmac.compare_digest(string, auth.encode()):
            raise HTTPException(403)
        response = Response(status_code=204, headers=headers(LOGIN_POLICY))
        response.set_cookie(
            cookie, value, COOKIE_SECONDS, path="/rondo", httponly=True, samesite="lax"
        )
        return response

    @own.get(run_pages.RUNS_PATH)
    def runs(request: Request) -> Response:
        if not has_logged_in(request):
            return logged_out()
        return HTMLResponse(run_pages.page(home), headers=headers(POLICY))

    @own.get(run_pages.REPORT_PATH + "/{run}")
    def report(run: str) -> RedirectResponse:
        return RedirectResponse(f"{run_pages.REPORT_PATH}/{run}/{run_pages.REPORT_NAME}")

    @own.get(run_pages.REPORT_PATH + "/{run}/{name:path}")
    def report_page(request: Request, run: str, name: str) -> Response:
        if not has_logged_in(request):
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


def logged_out() -> HTMLResponse:
    return HTMLResponse(LOGGED_OUT_PAGE, 401, headers=headers(LOGIN_POLICY))


def cookie_value(auth: str) -> str:
    """A value from which nobody can compute `auth`."""
    return hmac.new(auth.encode(), b"Rondo's own pages", hashlib.sha256).hexdigest()
