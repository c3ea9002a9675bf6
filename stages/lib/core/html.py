"""HTML pages that ask for nothing from outside, in which what models and people wrote is text."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(
    package: str, template: str, filters: dict[str, Callable[..., Any]], **values: Any
) -> str:
    """The page of a template that lies in `package`; everything is escaped, and a name that is
    missing is an error.
    """
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template).render(**values)
