"""A plan as a table in the terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effloop.plan.plan import CardPlan, Plan
from effloop.record.efficiency import rate_text
from effloop.report import charts

_LABEL, _COLUMN, _BAR = 24, 13, 32  # characters of the first column, of each card's, and of a bar beside the only one
_GIB = 2**30
_SOFT = "dim"


def print_plan(found: Plan) -> None:
    """Print the cards beside each other, what would help, and what the figures are made of."""
    console, facts, data = Console(), found.facts, found.data
    run = [facts["model"], f"{facts['image_size']} px", f"batch_size={facts['batch_size']}", f"{facts['epochs']} epochs"]
    run += [f"{data.images:,} images", f"{found.gpus} GPUs" if found.gpus > 1 else "one GPU"]
    console.print(Text(" · ".join(run), _SOFT))
    most = max(1, (console.width - _LABEL) // _COLUMN)
    for first in range(0, len(found.cards), most):
        console.print(_cards_table(found, found.cards[first : first + most]))
    if found.advice:
        table = _table("override", "brings", "why")
        for number, each in enumerate(found.advice):
            table.add_row(*map(Text, (each.override, each.brings, each.why)), style="" if number else "bold green")
        console.print(table)
    for note in found.notes:
        console.print(Text(note, _SOFT))


def _table(*headings: str) -> Table:
    return Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _cards_table(found: Plan, cards: Sequence[CardPlan]) -> Table:
    """A column for each card; beside a single one a bar for each part of its memory, and words."""
    table, alone, first = _table("memory of a GPU, GiB"), len(cards) == 1, cards[0]
    for card in cards:
        table.add_column(card.card, justify="right", no_wrap=True, min_width=_COLUMN - 2)
    if alone:
        table.add_column(first.title)
    before = 0
    for part in dict.fromkeys(part for card in cards for part in card.memory):
        sizes = [card.memory.get(part, 0) for card in cards]
        bar = _bar(first, before, sizes[0], _BAR)
        table.add_row(part, *(f"{size / _GIB:.2f}" if size else "-" for size in sizes), *[bar] * alone)
        before += sizes[0]
    totals = [Text(f"{card.peak_bytes / _GIB:.2f}", "bold" if card.fits else "bold red") for card in cards]
    bars = [_bar(card, 0, card.peak_bytes, _BAR if alone else _COLUMN - 2) for card in cards]
    table.add_row(Text(f"= at batch_size={first.batch}", "bold"), *totals, *bars[:alone])
    if not alone:
        table.add_row("", *bars)
    table.add_row("  of", *(f"{card.capacity / _GIB:.2f}" for card in cards), style=_SOFT)
    table.add_section()
    for row in zip(*(_figures(found, card) for card in cards), strict=True):
        label, style, value, ends, words = row[0]
        if alone:
            cells = [Text(value, style), Text(", ".join(filter(None, (" to ".join(ends), words))), _SOFT)]
        else:
            cells = [Text(text, style) + Text("\n" * bool(ends) + "-".join(ends), _SOFT) for _, _, text, ends, _ in row]
        table.add_row(Text(label, style), *cells)
    return table


def _bar(card: CardPlan, before: int, size: int, width: int) -> Text:
    """A part of a batch's memory, at its place in that of the card, or in the batch's where that is larger."""
    scale = width / max(card.capacity, card.peak_bytes)
    start = min(width - 1, round(before * scale))
    full = min(width - start, max(1, round(size * scale)))
    style = "blue" if card.fits else "red"
    return Text("░" * start, _SOFT) + Text("█" * full, style) + Text("░" * (width - start - full), _SOFT)


def _figures(found: Plan, card: CardPlan) -> Iterator[tuple[str, str, str, Sequence[str], str]]:
    """Rows of a card below its memory: label, style, value, the ends of its range, a few words."""
    loading, several = found.loading, f"of all {found.gpus} GPUs" if found.gpus > 1 else ""
    largest = [f"{end:,}" for end in card.largest_range]
    yield "largest batch", "bold", f"{card.largest_batch:,}", largest, "images of a GPU" if several else ""
    yield "saturates at", "", f"{card.saturating_batch:,}", (), "larger batches are at most 5 % faster"
    rates = [*map(rate_text, card.images_per_s_range)]
    yield "step, images/s", "bold", rate_text(card.images_per_s), rates, several
    if loading:
        words = f"measured on the {loading.cores} cores of this machine"
        yield "loader here, images/s", "", rate_text(loading.images_per_s), (), words
        yield "cores that feed a step", "", f"{card.cores:.1f}", (), "like those of this machine" + f", for {several}"
        yield "limited by", "bold", f"the {card.binds}", (), ""
    hours = [_hours(end) for end in card.hours_range]
    yield "hours", "bold", _hours(card.hours), hours, f"{_hours(card.evaluation_hours)} of these for evaluation"
    if any(each.cost for each in found.cards):
        yield "cost", "bold", f"{card.cost:,.2f}", (), several


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


def plot_plan(found: Plan, path: Path) -> None:
    """Write a PNG: images/s over the batch size, the loader's rate as a line, and memory by part."""
    from matplotlib.figure import Figure

    cards, names = found.cards, [card.card for card in found.cards]
    with charts.style():
        figure = Figure(figsize=(10, 4), layout="constrained")
        speed, memory = figure.subplots(1, 2, width_ratios=(3, 2))
        for card, colour in zip(cards, charts.colours(len(cards)), strict=True):
            if not card.curve:
                continue
            batches, rates = zip(*card.curve, strict=True)
            low, high = ([rate * end / card.images_per_s for rate in rates] for end in card.images_per_s_range)
            speed.plot(batches, rates, color=colour, label=card.card)
            speed.fill_between(batches, low, high, color=colour, alpha=0.12, linewidth=0)
            speed.plot(batches[-1], rates[-1], "o", color=colour)
        if found.loading:
            speed.axhline(found.loading.images_per_s, color=charts.INK, linestyle="--", label="loader here")
        speed.set_xscale("log", base=2)
        speed.xaxis.set_major_formatter("{x:,.0f}")
        speed.yaxis.set_major_formatter("{x:,.10g}")
        speed.set(xlabel="images of a GPU's batch; dot: the largest that fits", ylabel="images/s", ylim=(0, None))
        speed.legend(fontsize="small")
        left = [0.0] * len(cards)
        parts = [*dict.fromkeys(part for card in cards for part in card.memory)]
        for part, colour in zip(parts, charts.colours(len(parts)), strict=True):
            sizes = [card.memory.get(part, 0) / _GIB for card in cards]
            memory.barh(names, sizes, left=left, color=colour, label=part)
            left = [sum(pair) for pair in zip(left, sizes, strict=True)]
        memory.barh(names, [card.capacity / _GIB for card in cards], fill=False, edgecolor=charts.INK)
        memory.invert_yaxis()
        memory.set(xlabel=f"GiB at batch_size={cards[0].batch}; frame: what a GPU has")
        memory.legend(fontsize="x-small")
        charts.save_png(figure, path)
