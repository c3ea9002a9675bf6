"""The names of runs in Prefect and MLflow."""

import re

from coolname.data import config

GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma"
    "|tau|upsilon|phi|chi|psi|omega"
)
# What Prefect's form fills in: `omega4-aquarii-vector`
FORM_NAME = re.compile(rf"({GREEK})\d*-[a-z-]+")
# What Prefect's server makes up: `bald-stallion`
ANIMALS = {
    word
    for name, entry in config.items()
    if name.startswith(("animal", "subj")) and isinstance(entry, dict)
    for word in entry.get("words", ())
}


def typed_name(name: str | None) -> str:
    """The name of a flow run if a person has typed it; empty if Prefect made it up."""
    words = (name or "").split("-")
    by_server = len(words) == 2 and words[-1] in ANIMALS
    return "" if not name or by_server or FORM_NAME.fullmatch(name) else name


def short_name(kind: str, run: str) -> str:
    """The name of a run in MLflow's list, which cuts long names: without the day and time."""
    return f"{kind} {run.rpartition('-')[2]}"
