"""A plan as a table in the terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from effloop.plan.plan import CardPlan, Plan
from effloop.record.efficiency import rate_text
from effloop.report import charts

_COLUMN, _BAR = 13, 32  # characters of a card's column at least, and of a bar beside the only one
_GIB = 2**30


def print_plan(found: Plan) -> None:
    """Print the cards beside each other, what would help, and what the figures are made of."""
    console = Console()
    console.print(Text(_title(found), "dim"))
    cards, unlimited = found.cards, console.options.update_width(1000)
    while cards:
        for count in range(min(len(cards), max(1, console.width // _COLUMN)), 0, -1):
            table = _cards_table(found, cards[:count])
            if Measurement.get(console, unlimited, table).maximum <= console.width:
                break
        console.print(table)
        cards = cards[count:]
    if small := [card.card for card in found.cards if not card.fits]:
        line = f"a batch of {found.cards[0].batch} doesn't fit into {', '.join(small)}"
        console.print(Text(f"{line}; speed, time and cost are of the largest one", "red"))
    if found.advice:
        table = _table()
        table.add_column("what would help", no_wrap=True, overflow="ignore")  # to be pasted
        table.add_column(f"on {found.cards[0].card}")
        for each in found.advice:
            table.add_row(Text(each.override), Text.assemble(each.brings, (f"; {each.why}", "dim")))
        console.print(table)
    console.print(Text("\n".join(found.notes), "dim"))


def _title(found: Plan) -> str:
    """The run, in a line."""
    facts = found.facts
    run = [f"{facts['model']}, {facts['image_size']} px", f"batch_size={facts['batch_size']}"]
    run += [f"{facts['epochs']} epochs of {found.data.images:,} images", f"{found.gpus} GPU{'s' * (found.gpus > 1)}"]
    return " · ".join(run)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _cards_table(found: Plan, cards: Sequence[CardPlan]) -> Table:
    """A column for each card; beside a single one a bar for each part of its memory, and words."""
    table, alone, before = _table(), len(cards) == 1, 0
    table.add_column("memory of a GPU, GiB", no_wrap=True)
    for card in cards:
        table.add_column(card.card, justify="right", no_wrap=True, min_width=_COLUMN - 2)
    if alone:
        table.add_column(cards[0].title)
    for part in dict.fromkeys(part for card in cards for part in card.memory):
        sizes = [card.memory.get(part, 0) for card in cards]
        table.add_row(part, *map(_gib, sizes), *[_bar(cards[0], sizes[0], before, _BAR)] * alone)
        before += sizes[0]
    totals = [Text(_gib(card.peak_bytes), "bold" if card.fits else "bold red") for card in cards]
    bars = [_bar(card, card.peak_bytes, 0, _BAR if alone else _COLUMN - 2) for card in cards]
    cells = [*totals, *bars] if alone else [total + "\n" + bar for total, bar in zip(totals, bars, strict=True)]
    table.add_row(Text(f"peak at batch_size={cards[0].batch}", "bold"), *cells)
    table.add_row("available", *(_gib(card.capacity) for card in cards), style="dim", end_section=True)
    for row in zip(*(_figures(found, card) for card in cards), strict=True):
        cells = []
        for _, form, value, ends, words in row:
            span = dict.fromkeys(map(form, ends))
            texts = ["-".join(span)] * (len(span) > 1) + [words] * (alone and words != "")
            cells += [Text(form(value) if value else "-", "bold"), Text(", ".join(texts), "dim")]
        if not alone:
            cells = [Text("\n").join(filter(None, pair)) for pair in zip(cells[::2], cells[1::2], strict=True)]
        table.add_row(row[0][0], *cells)
    return table


def _gib(size: int) -> str:
    return "-" if not size else f"{size / _GIB:.2f}" if size >= 0.005 * _GIB else "<0.01"


def _bar(card: CardPlan, size: int, before: int, width: int) -> Text:
    """A part of a batch's memory, at its place in that of the card, or in the batch's where that is larger."""
    scale, style = width / max(card.capacity, card.peak_bytes), "blue" if card.fits else "red"
    start = min(width - 1, round(before * scale))
    full = min(width - start, max(1, round(size * scale)))
    return Text.assemble(("░" * start, "dim"), ("█" * full, style), ("░" * (width - start - full), "dim"))


_Figure = tuple[str, Callable[[Any], str], float | str, Sequence[float], str]


def _figures(found: Plan, card: CardPlan) -> Iterator[_Figure]:
    """Rows of a card below its memory: label, how numbers are formatted, the number, its range, a few words."""
    loading, together = found.loading, f"of {found.gpus} GPUs together" if found.gpus > 1 else ""
    yield "largest batch", "{:,}".format, card.largest_batch, card.largest_range, "images of a GPU"
    yield "saturates at", "{:,}".format, card.saturating_batch, (), "larger batches are at most 5 % faster"
    yield "step, images/s", rate_text, card.images_per_s, card.images_per_s_range, together
    if loading:
        words = f"measured on the {loading.cores} cores of this machine"
        yield "loader here, images/s", rate_text, loading.images_per_s, (), words
        yield "cores to feed the step", "{:.1f}".format, card.cores, (), "like those of this machine"
        yield "limited by", "the {}".format, card.binds, (), ""
    longest = max(each.hours for each in found.cards)
    unit, parts = ("hours", 1) if longest >= 1 else ("minutes", 60) if longest >= 1 / 60 else ("seconds", 3600)
    hours, low, high, evaluation = (parts * each for each in (card.hours, *card.hours_range, card.evaluation_hours))
    yield unit, rate_text, hours, (low, high), f"{rate_text(evaluation)} of them evaluation" if evaluation else ""
    if any(each.cost for each in found.cards):
        yield "cost", "{:,.2f}".format, card.cost, (), together


def plot_plan(found: Plan, path: Path) -> None:
    """Write a PNG: images/s over the batch size, the loader's rate as a line, and memory by part."""
    from matplotlib.figure import Figure

    cards, names = found.cards, [card.card for card in found.cards]
    with charts.style():
        figure = Figure(figsize=(10, max(4, 0.3 * len(cards))), layout="constrained")
        figure.suptitle(_title(found), fontsize="medium")
        speed, memory = figure.subplots(1, 2, width_ratios=(3, 2))
        for card, colour in zip(cards, charts.colours(len(cards)), strict=True):
            if card.curve:
                batches, rates = np.array(card.curve).T
                low, high = np.outer(card.images_per_s_range, rates / card.images_per_s)
                speed.plot(batches, rates, color=colour, label=card.card, marker="o", markevery=[-1])
                speed.fill_between(batches, low, high, color=colour, alpha=0.12, linewidth=0)
        if found.loading:
            speed.axhline(found.loading.images_per_s, color=charts.INK, linestyle="--", label="loader here")
        speed.set_xscale("log", base=2)
        speed.xaxis.set_major_formatter("{x:,.0f}")
        speed.yaxis.set_major_formatter("{x:,.10g}")
        speed.set(
            xlabel="images of a GPU's batch; dot: the largest that fits", ylabel="images/s of the step", ylim=(0, None)
        )
        speed.legend(fontsize="small")
        parts, left = [*dict.fromkeys(part for card in cards for part in card.memory)], np.zeros(len(cards))
        for part, colour in zip(parts, charts.colours(len(parts)), strict=True):
            sizes = np.array([card.memory.get(part, 0) / _GIB for card in cards])
            memory.barh(names, sizes, left=left, color=colour, label=part)
            left += sizes
        memory.barh(names, [card.capacity / _GIB for card in cards], fill=False, edgecolor=charts.INK)
        memory.invert_yaxis()
        memory.set(xlabel=f"GiB at batch_size={cards[0].batch}; frame: what a GPU has")
        figure.legend(*memory.get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
        charts.save_png(figure, path)
