"""Pages that need nothing else: templates that escape whatever they are given, and the style that all share."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from effloop.report.pipeline import format_gain, format_rate, format_share
from effloop.report.values import shorten, to_text

if TYPE_CHECKING:
    from jinja2 import Environment


def environment() -> Environment:
    """The templates of this folder; the filter `text` makes a value one line, and Jinja escapes it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("effloop.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "text": to_text,
        "rate": format_rate,
        "gain": format_gain,
        "share": format_share,
        "shorten": shorten,
    }
    return jinja


def stylesheet() -> str:
    """The CSS of all pages."""
    return "".join((files("effloop.report") / name).read_text("utf-8") for name in ("report.css", "pipeline.css"))
