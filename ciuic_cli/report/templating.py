"""The Jinja2 environment of the report page. It makes every printed string harmless: printable and HTML-escaped."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ciuic_cli.errors import printable
from ciuic_cli.report.readable import readable_bytes, readable_kl

LINE_LIMIT = 200
"""Characters of a line that a template prints unless the filter `text` gives another limit (chosen)."""


def render_template(name: str, **context: object) -> str:
    """The template `name` of this package's folder `templates`, filled in."""
    return _environment().get_template(name).render(**context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ciuic_cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters.update(bytes=readable_bytes, kl=readable_kl, text=_text)
    return environment


def _text(value: object, limit: int) -> Markup:
    """Filter: the value with at most `limit` characters of each line, instead of LINE_LIMIT."""
    return escape("\n".join(printable(line, limit) for line in str(value).split("\n")))


def _harmless(value: object) -> object:
    """Jinja2 calls this for every printed expression, so control characters and endless names never reach the page."""
    return _text(value, LINE_LIMIT) if isinstance(value, str) and not isinstance(value, Markup) else value
