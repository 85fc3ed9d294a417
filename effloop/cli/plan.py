"""`plan`: memory, batch size, speed and cost of a run on GPUs that aren't here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command, new_files
from effloop.errors import ConfigError
from effloop.plan import cards as table
from effloop.record.rows import finite
from effloop.system.files import explained_writing, write_text


class Prices(tuple[float, ...]):
    """An option's value: a price, or several."""

    form: ClassVar = "X[,...]"
    allowed: ClassVar = "numbers above 0, with commas between"

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Raises a ValueError for anything else."""
        found = cls(map(float, text.strip("[]").split(",")))
        if not all(0 < each < inf for each in found):
            raise ValueError
        return found


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`.

    Attributes:
        gpu: names of GPUs, such as h100 or rtx3090; without it this machine's.
        gpus: how many of them the run has.
        price: of a GPU for an hour, in any currency: one for each name in gpu=, or one for all.
        images: of the training split, where the data isn't on this machine; with classes=.
        classes: of that data, or of its masks.
        out: a file for the figures, OUT.json, with a plot beside it, OUT.png; without it nothing is written.
    """

    gpu: tuple[str, ...] = ()
    gpus: Annotated[int, range(1, 10_001)] = 1
    price: Prices | None = None
    images: Annotated[int, range(1, 10**12 + 1)] | None = None
    classes: Annotated[int, range(1, 10**6 + 1)] | None = None
    out: Path | None = None


@command("plan", PlanOptions, "gpu=a10,a100,h100 model=resnet50 batch_size=256 amp=true")
def plan(options: PlanOptions, overrides: list[str]) -> int:
    """Memory, batch size, speed and cost on a GPU, before it is rented.

    Takes what `train` takes. A step is traced without a GPU, and the loader is measured on this machine. What each
    figure is made of, and how far off such figures were, is said below them.
    """
    cards, config = [table.find(name) for name in options.gpu], configs.compose(overrides)
    if config.device.partition(":")[0] not in ("auto", "cuda"):
        raise ConfigError(f"device: a plan is of GPUs; drop device={config.device}")
    if options.gpus > 1 and config.parallel.name == "dp":
        raise ConfigError(f"parallel: dp isn't planned for {options.gpus} GPUs; set parallel=ddp or fsdp")
    title, own = _own()
    if not (cards := cards or ([own] if own else [])):
        raise ConfigError(f"gpu: this machine has {title}; set gpu=NAME, or several, of {', '.join(table.cards)}")
    names = [card.name for card in cards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"gpu: {twice[0]} is named more than once, in other words; set each once")
    prices = tuple(options.price or ())
    if len(prices) not in (0, 1, len(cards)):
        fix = "set one for each name in gpu=, or one for all"
        raise ConfigError(f"price: {len(prices)} prices for gpu={','.join(names)}; {fix}")
    files = new_files(options.out, ".json", ".png") if options.out else []
    from effloop.measure.measured import loading_here, step_here
    from effloop.plan import picture
    from effloop.plan import plan as planning

    data = planning.data_of(config, options.images, options.classes)
    with Console(stderr=True).status("measuring the loader, and tracing a step"):
        prices *= len(cards) if len(prices) == 1 else 1
        load = None if options.images else loading_here
        found = planning.plan(
            config, cards, data, gpus=options.gpus, prices=prices, load=load, own=own, measure=step_here
        )
    picture.print_plan(found)
    if files:
        with explained_writing("out", files[0], "set out=NAME"):
            write_text(files[0], json.dumps(finite(found.to_plain()), indent=2) + "\n")
            picture.plot_plan(found, files[1])
        print("figures: {}   plot: {}".format(*files))
    return 0


def _own() -> tuple[str, table.Card | None]:
    """The GPU of this machine."""
    from effloop.system import gpu

    title = gpu.name(gpu.find_device("cuda:0")) if gpu.count() else "no GPU"
    return title, table.of_device(title)
