"""`rondo label`: serve the page on which people compare responses, until Ctrl-C."""

from contextlib import chdir
from pathlib import Path

from flows.core.git import person
from flows.core.login import Login
from flows.core.services import HOME, HOST, listen, new_auth
from flows.execution.worktree import folder_of_run
from flows.labelling.pages import PATH, make_app
from flows.labelling.session import Session
from flows.report.people import Of, lines
from flows.report.round_files import label_path
from stages.lib.core.errors import BadInput
from stages.lib.core.params import load_params


def serve_labels(
    round_: str, of: Of, count: int, by: str | None, run: str | None, port: int
) -> None:
    """Serve until Ctrl-C, then print the results; see the command's help.

    Raises:
        BadInput: there is no such round or run, it has nothing to compare, or the port is taken.
    """
    import uvicorn

    if count < 1:
        raise BadInput(f"--comparisons {count}: expected at least 1")
    folder = folder_of_run(run, HOME.resolve()) if run else Path.cwd()
    with chdir(folder):
        load_params().check_round(round_)
        session = Session(round_, of, count)
        listener = listen(HOST, port)
        port = listener.getsockname()[1]
        auth = new_auth()
        app = make_app(session, person(by), Login(port, auth, PATH))
        print(f"{len(session.comparisons)} comparisons: open http://{HOST}:{port}/rondo#{auth}")
        print("Ctrl-C ends it; what was judged is kept, and it resumes there")
        server = uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning"))
        try:
            server.run(sockets=[listener])
        finally:
            print("\n".join([*lines(round_, of), f"verdicts: {label_path(round_)}; commit it"]))
