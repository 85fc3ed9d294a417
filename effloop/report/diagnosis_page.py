"""A diagnosis as one HTML file that needs nothing else: no network, no server, no JavaScript."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from effloop.errors import PROGRAM
from effloop.report.comparison import as_number, finite_values, to_text
from effloop.report.pipeline import Override, Pipeline, dicts, read_facts, read_pipeline
from effloop.report.templates import environment, stylesheet
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
            commands=_commands(to_text(result.get("command") or ""), pipeline.overrides),
            **_memory(memory if isinstance(memory, Mapping) else {}),
        )
    )


def _top(pipeline: Pipeline) -> float:
    """The images/s that the widest bar of the overrides stands for."""
    rates = [rate for each in pipeline.overrides for rate in (each.rate, each.measured)]
    return max(finite_values([pipeline.rate, *rates]), default=math.nan)


def _commands(command: str, overrides: Sequence[Override]) -> list[str]:
    """What to type: the diagnosed command with each override, or a command that an override is itself."""
    training = re.sub(r"\s+verify=\S*", "", command).replace(" diagnose", " train", 1)
    lines = []
    for each in overrides:
        if "=" not in each.text.partition(" ")[0]:
            lines.append(f"{PROGRAM} {each.text}")
        elif training:
            lines.append(f"{training} {each.text}")
    return lines


def _memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of parts, and of places: name, bytes needed, bytes free, and the share of the latter, NaN if not known."""
    parts = [
        (*(to_text(row.get(key) or "") for key in ("part", "place", "count")), _bytes(row.get("bytes")))
        for row in dicts(memory.get("rows"))
    ]
    places = []
    found = memory.get("places")
    for name, place in found.items() if isinstance(found, Mapping) else ():
        if isinstance(place, Mapping):
            needed, free = as_number(place.get("needed")), as_number(place.get("free"))
            share = needed / free if free > 0 else math.nan
            places.append((to_text(name), _bytes(needed), _bytes(free), share))
    return {"memory_parts": parts, "memory_places": places}


def _bytes(value: Any) -> str:
    number = as_number(value)
    return decimal(int(number)) if math.isfinite(number) else "-"
