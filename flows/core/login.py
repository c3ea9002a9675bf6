"""The login of Rondo's own pages.

The page /rondo#STRING logs a browser in. A browser sends what follows the # to no server, and the
page leaves no entry in the browser's history. It puts the string where Prefect's pages look for it,
the local storage, and posts it to /rondo/login, which answers with a cookie for Rondo's own pages.
"""

import hashlib
import hmac

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

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
LOGIN_PAGE = f"""{LOG_IN}<p hidden>This link is not of this server: <code>rondo up</code>, or
<code>rondo label</code>, prints the link that logs this browser in.</p><script>
const string = location.hash.slice(1)
history.replaceState(null, "", location.pathname)
logIn(string).then(accepted => {{
  if (!accepted) return document.querySelector("p").hidden = false
  localStorage.setItem("{KEY}", btoa(string))
  location.replace("START")
}})
</script>"""
# A browser that logged in to Prefect gets the cookie without a click
LOGGED_OUT_PAGE = f"""{LOG_IN}<p hidden>Log in first: open the link that <code>rondo up</code>,
or <code>rondo label</code>, prints, then this page again.</p><script>
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


def headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


class Login:
    """Who has logged in to a server.

    Args:
        port: of the server. A browser sends a cookie to all ports of a host, so its name has it.
        auth: the string that logs in; without one nobody can.
        start: the page to which the login leads.
    """

    def __init__(self, port: int, auth: str, start: str) -> None:
        self.auth, self.start = auth, start
        self.cookie, self.value = f"rondo-{port}", cookie_value(auth)

    def accepted(self, request: Request) -> bool:
        sent = request.cookies.get(self.cookie, "")
        return bool(self.auth) and hmac.compare_digest(sent.encode(), self.value.encode())

    def router(self) -> APIRouter:
        """The page that logs in, and what it posts to."""
        own = APIRouter()

        @own.get("/rondo")
        def login_page() -> HTMLResponse:
            page = LOGIN_PAGE.replace("START", self.start)
            return HTMLResponse(page, headers=headers(LOGIN_POLICY))

        @own.post(LOGIN_PATH)
        async def log_in(request: Request) -> Response:
            string = b""
            async for chunk in request.stream():
                string += chunk
                if len(string) > MAX_STRING_BYTES:
                    raise HTTPException(413)
            if not self.auth or not hmac.compare_digest(string, self.auth.encode()):
                raise HTTPException(403)
            response = Response(status_code=204, headers=headers(LOGIN_POLICY))
            response.set_cookie(
                self.cookie,
                self.value,
                COOKIE_SECONDS,
                path="/rondo",
                httponly=True,
                samesite="lax",
            )
            return response

        return own


def logged_out() -> HTMLResponse:
    return HTMLResponse(LOGGED_OUT_PAGE, 401, headers=headers(LOGIN_POLICY))


def cookie_value(auth: str) -> str:
    """A value from which nobody can compute `auth`."""
    return hmac.new(auth.encode(), b"Rondo's own pages", hashlib.sha256).hexdigest()
