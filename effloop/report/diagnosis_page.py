"""A diagnosis as one HTML file that needs nothing else: no network, no server, no JavaScript."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from effloop.report.page import environment, stylesheet
from effloop.report.pipeline import Pipeline, dicts, read_facts, read_pipeline
from effloop.report.values import as_number, finite_values, to_text
from effloop.runs.environment import effloop_version


def render_diagnosis(result: Mapping[str, Any]) -> str:
    """The page of a diagnosis, everything in it escaped.

    Args:
        result: as in diagnosis.json; whatever is missing in it is left out.
    """
    pipeline = read_pipeline(result)
    memory = result.get("memory")
    return (
        environment()
        .get_template("diagnosis.html.j2")
        .render(
            style=stylesheet(),
            version=effloop_version(),
            date=to_text(result.get("date") or time.strftime("%Y-%m-%d %H:%M")),
            facts=[(name, text) for name, text in read_facts(result) if name != "date"],
            pipeline=pipeline,
            top=_top(pipeline),
            tried=any(math.isfinite(each.measured) for each in pipeline.overrides),
            commands=[line for each in pipeline.overrides for line in each.commands],
            **_memory(memory if isinstance(memory, Mapping) else {}),
        )
    )


def _top(pipeline: Pipeline) -> float:
    """The images/s that the widest bar of the overrides stands for."""
    rates = [rate for each in pipeline.overrides for rate in (each.rate, each.measured)]
    return max(finite_values([pipeline.rate, *rates]), default=math.nan)


def _memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of parts, and of places: name, bytes needed, bytes there are, and their ratio, NaN if not known."""
    parts = [
        (*(to_text(row.get(key) or "") for key in ("name", "place", "detail")), _bytes(row.get("bytes")))
        for row in dicts(memory.get("parts"))
    ]
    totals, there = (next(iter(dicts([memory.get(key)])), {}) for key in ("total", "capacity"))
    places = []
    for name in totals:
        needed, most = as_number(totals[name]), as_number(there.get(name))
        share = needed / most if most > 0 else math.nan
        places.append((to_text(name), _bytes(needed), _bytes(most), share))
    return {"memory_parts": parts, "memory_places": places}


def _bytes(value: Any) -> str:
    number = as_number(value)
    return decimal(int(number)) if math.isfinite(number) else "-"
