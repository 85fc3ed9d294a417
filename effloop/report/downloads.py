"""What was fetched for runs on remote data."""

from __future__ import annotations

from collections.abc import Mapping

from effloop.report.values import as_number
from effloop.runs.reader import RunRecord


def downloaded(run: RunRecord) -> dict[str, float]:
    """Bytes of the data, those fetched, the share that was there, 10^6 bytes fetched in a second; empty without."""
    told = run.summary.get("download")
    names = ("bytes", "fetched_bytes", "hit_rate", "mb_per_s")
    return {name: as_number(told.get(name)) for name in names} if isinstance(told, Mapping) else {}


def download_line(run: RunRecord) -> str:
    """The same in words; empty without."""
    if not (found := downloaded(run)):
        return ""
    speed = f", {found['mb_per_s']:,.1f} MB/s" if found["fetched_bytes"] else ""
    line = f"{found['fetched_bytes'] / 1e6:,.1f} of {found['bytes'] / 1e6:,.1f} MB fetched{speed}"
    line += f"; {found['hit_rate']:.1%} of the bytes were there already"
    return line + _in_windows(run.summary["download"])


def _in_windows(told: Mapping[str, object]) -> str:
    """What `data.window` has fetched while the run trained; empty without."""
    if "window_bytes" not in told:
        return ""
    count, speed, wait = (as_number(told.get(f"window_{name}")) for name in ("bytes", "mb_per_s", "wait_s"))
    return f"; then {count / 1e6:,.1f} MB by data.window, {speed:,.1f} MB/s, of which batches waited {wait:,.1f} s"
