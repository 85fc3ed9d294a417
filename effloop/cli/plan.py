"""`plan`: memory, batch size, speed and cost of a run on GPUs that aren't here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from rich.console import Console

from effloop import config as configs
from effloop.cli.command import command, new_files
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.plan import cards as table
from effloop.plan.cards import Card
from effloop.record.rows import finite
from effloop.system.files import describe_failure, write_text

if TYPE_CHECKING:
    from effloop.plan.plan import Plan


class Cards(tuple[Card, ...]):
    """GPUs, as an option."""

    form: ClassVar = "NAME[,...]"
    allowed: ClassVar = "names of GPUs, with commas between"

    @classmethod
    def parse(cls, text: str) -> Cards:
        """Each once, by whatever names; a ConfigError for one that isn't in the table."""
        return cls(dict.fromkeys(map(table.find, text.removeprefix("[").removesuffix("]").split(","))))


class Prices(tuple[float, ...]):
    """Prices, as an option."""

    form: ClassVar = "X[,...]"
    allowed: ClassVar = "numbers above 0, with commas between"

    @classmethod
    def parse(cls, text: str) -> Prices:
        """A ValueError for anything but finite numbers above 0."""
        found = cls(map(float, text.removeprefix("[").removesuffix("]").split(",")))
        if not all(0 < each < math.inf for each in found):
            raise ValueError
        return found


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`.

    Attributes:
        gpu: names of GPUs, such as h100 or rtx3090, with commas between; without it this machine's.
        gpus: how many of them the run has.
        price: of a GPU for an hour, in any currency: one for each name in gpu=, or one for all.
        images: of the training split, where the data isn't on this machine; with classes=.
        classes: of that data, or of its masks.
        out: a file for the figures, OUT.json, with a plot beside it, OUT.png; without it nothing is written.
    """

    gpu: Cards | None = None
    gpus: Annotated[int, range(1, 10_001)] = 1
    price: Prices | None = None
    images: Annotated[int, range(1, 10**12 + 1)] | None = None
    classes: Annotated[int, range(1, 10**6 + 1)] | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if (self.images is None) != (self.classes is None):
            given, missing = ("images", "classes") if self.images else ("classes", "images")
            raise ConfigError(f"{given}: data that isn't on this machine needs {missing}=N, too")


@command("plan", PlanOptions, "gpu=a10,a100,h100 model=resnet50 batch_size=256 amp=true")
def plan(options: PlanOptions, overrides: list[str]) -> int:
    """Memory, batch size, speed and cost on a GPU, before it is rented.

    Takes what `train` takes. A step is traced without a GPU, and the loader is measured on this machine. What each
    figure is made of, and how far off such figures were, is said below them.
    """
    config = configs.compose(overrides)
    cards = options.gpu or Cards([_own()])
    prices = _prices(options.price, len(cards))
    for card in cards:
        _check(config, options.gpus, card)
    outputs = new_files(options.out, ".json", ".png") if options.out else []
    from effloop.plan import plan as planning
    from effloop.plan.picture import plot_plan, print_plan

    with Console(stderr=True).status("a step is traced, and loading measured"):
        found = planning.plan(
            config, overrides, cards, options.gpus, prices, images=options.images, outputs=options.classes
        )
    _refuse_what_never_fits(found)
    print_plan(found)
    if outputs:
        figures, plot = outputs
        try:
            write_text(figures, json.dumps(finite(found.to_plain()), indent=2) + "\n")
            plot_plan(found, plot)
        except OSError as error:
            raise ConfigError(f"out: {describe_failure(figures, error)}; set out=NAME") from None
        print(f"figures: {figures}   plot: {plot}")
    return 0


def _own() -> Card:
    """The GPU of this machine."""
    from effloop.system import gpu

    known = ", ".join(table.cards)
    if not gpu.count():
        raise ConfigError(f"gpu: this machine has none; set gpu=NAME, or several with commas between, of {known}")
    title = gpu.name(gpu.use(gpu.find_device("cuda")))
    if not (card := table.of_device(title)):
        raise ConfigError(f"gpu: this machine's '{title}' is not in the table; set gpu=NAME, of {known}")
    return card


def _prices(given: Sequence[float] | None, count: int) -> Sequence[float]:
    """An hour's price of each of `count` cards; 0 where there is none."""
    prices = given or (0.0,)
    if len(prices) not in (1, count):
        raise ConfigError(
            f"price: {len(prices)} prices for {count} GPUs; set one for each name in gpu=, or one for all"
        )
    return [*prices, *prices[:1] * (count - len(prices))]


def _check(config: Config, gpus: int, card: Card) -> None:
    """Refuse what a run on these GPUs would refuse."""
    name = config.precision.name if config.precision else "fp32"
    if name in ("tf32", "bf16") and not getattr(card, name):
        raise ConfigError(
            f"precision: '{name}' is not supported on {card.name}, which has fp32, fp16, amp; set amp=true"
        )
    if config.device == "cpu":
        raise ConfigError("device: a plan is of the GPUs in gpu=, not of the cpu; drop device=cpu")
    if gpus > 1 and config.parallel.name == "dp":
        raise ConfigError(f"parallel: dp isn't planned for {gpus} GPUs; set parallel=ddp, which is faster, or fsdp")


def _refuse_what_never_fits(found: Plan) -> None:
    """Where no card holds even one image, say what is too large."""
    if any(card.largest_batch for card in found.cards):
        return
    card = max(found.cards, key=lambda card: card.capacity)
    part, size = max(card.memory.items(), key=lambda item: item[1])
