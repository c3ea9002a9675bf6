"""Self-contained HTML pages. Texts of models and people are escaped."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(
    package: str, template: str, filters: dict[str, Callable[..., Any]], **values: Any
) -> str:
    """Render a Jinja template of a package.

    Args:
        package: the package that contains the template file.
        template: file name of the template.
        filters: Jinja filters by name.
        values: values of the template's variables; all are escaped.

    Raises:
        UndefinedError: the template uses a variable that is not in `values`.
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
