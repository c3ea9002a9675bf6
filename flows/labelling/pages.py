"""The server of `rondo label`: one page, and what it requests."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel

from flows.core.login import Login, headers, logged_out
from flows.labelling.session import CAUSES, MAX_NOTE, MAX_PERSON, Answer, Person, Session
from stages.lib.core.errors import BadInput
from stages.lib.core.html import render_page

PATH = "/rondo/label"
MAX_BODY_BYTES = 64 * 1024  # of a request; a note has 2,000 characters
# Texts come as JSON and are shown as text: none of them is in the page's HTML
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Who(BaseModel, extra="forbid"):
    by: Person


def make_app(session: Session, person: str, login: Login) -> FastAPI:
    """The application.

    Args:
        session: what is labelled.
        person: whose name the page has at first.
        login: who may see and label.
    """

    def only_logged_in(request: Request) -> None:
        """The cookie is SameSite: no other site's page sends a request that has it."""
        if not login.accepted(request):
            raise HTTPException(401, "log in first: open the link that the command prints")

    app = FastAPI(title="rondo label", docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(prefix=PATH, dependencies=[Depends(only_logged_in)])

    @app.middleware("http")
    async def small_requests_only(
        request: Request, following: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """FastAPI reads a body before it knows who sent it."""
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or int(length) > MAX_BODY_BYTES:
            return JSONResponse({"detail": f"more than {MAX_BODY_BYTES} bytes"}, 413)
        return await following(request)

    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    @app.get(PATH)
    def page(request: Request) -> Response:
        if not login.accepted(request):
            return logged_out()
        html = render_page(
            "flows.report",
            "label.html.jinja",
            {},
            path=PATH,
            round=session.round,
            of=session.of.value,
            person=person,
            causes=CAUSES,
            max_person=MAX_PERSON,
            max_note=MAX_NOTE,
        )
        return HTMLResponse(html, headers=headers(POLICY))

    @api.post("/next")
    def following(who: Who) -> dict[str, Any]:
        return session.following(who.by)

    @api.post("/answer")
    def answer(sent: Answer) -> dict[str, Any]:
        return session.answer(sent)

    @api.post("/undo")
    def undo(who: Who) -> dict[str, Any]:
        return session.undo(who.by)

    @api.post("/finish")
    def finish(who: Who) -> list[str]:
        return session.finish(who.by)

    app.include_router(login.router())
    app.include_router(api)
    return app
