"""Options of commands, from a dataclass."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from plans import line

from effloop.cli.command import options_of, parse
from effloop.errors import PROGRAM, ConfigError

SIDES = {"left": 1, "right": 2}


@dataclass(frozen=True)
class Options:
    """What is done.

    Attributes:
        run: which run.
        side: on which side, in more words than
            fit in a line.
        size, shares: how much.
    """

    run: Path = field(metadata={"positional": "RUN"})
    side: Annotated[str, SIDES] = "left"
    size: Annotated[int, range(1, 65)] = 8
    shares: tuple[float, ...] = ()
    level: Literal["auto", "none"] | Annotated[int, range(0, 10)] | None = None
    split: Annotated[Literal["train", "val"], "see data.train_split"] = "train"
    name: str = ""
    force: bool = False


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("side=right", "right"),
        ("size=64", 64),
        ("shares=0.5", (0.5,)),
        ("shares=0.5,1e3,-2", (0.5, 1000.0, -2.0)),
        ("level=auto", "auto"),
        ("level=0", 0),
        ("split=val", "val"),
        ("name=a=b", "a=b"),
        ("force=true", True),
        ("force=false", False),
        ("--force", True),
    ],
)
def test_values(word, value):
    options, rest = parse(Options, "go", ["x/y", word])
    assert getattr(options, word.partition("=")[0].removeprefix("--")) == value
    assert (options.run, rest) == (Path("x/y"), [])


def test_the_same_twice():
    assert parse(Options, "go", ["x", "size=3", "size=3"])[0].size == 3


def test_other_words_are_left_over_in_their_order():
    words = ["x", "epochs=3", "size=9", "+optim.lr=1", "-m", "y", "sizes=2", "data.size=3", "~size"]
    options, rest = parse(Options, "go", words, keys={"epochs", "sizes"})
    assert options == Options(Path("x"), size=9)
    assert rest == ["epochs=3", "+optim.lr=1", "-m", "y", "sizes=2", "data.size=3", "~size"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], f"go needs RUN; see {PROGRAM} go --help"),
        (["size=3"], f"go needs RUN; see {PROGRAM} go --help"),
        (["-m", "x"], f"go needs RUN; see {PROGRAM} go --help"),
        (
            ["n" * 256],
            f"run: '{'n' * 256}' is not allowed; set a PATH on this machine, whose names have at most 255 bytes",
        ),
        (["x", "side=rigth"], "side: 'rigth' is not allowed; set left or right; did you mean 'right'?"),
        (["x", "size=65"], "size: '65' is not allowed; set a whole number from 1 to 64"),
        (["x", "size=2.5"], "size: '2.5' is not allowed; set a whole number from 1 to 64"),
        (["x", "shares=1,1"], "shares: '1,1' is not allowed; set a number or several, each once, with commas between"),
        (["x", "level=high"], "level: 'high' is not allowed; set auto, none or a whole number from 0 to 9"),
        (["x", "split=no"], "split: 'no' is not allowed; set train or val; see data.train_split"),
        (["x", "size=3", "size=4"], "go: size=4 contradicts size=3; drop one of them"),
        (["x", "force=yes"], "force: 'yes' is not allowed; set true or false"),
        (["x", "size="], "go: 'size=' has no value; set size=N or drop it"),
        (["x", "size"], "go: 'size' has no value; set size=N or drop it"),
        (["x", "level="], "go: 'level=' has no value; set level=auto|none|N or drop it"),
        (
            ["x", "sise=3"],
            "go: no option 'sise'; have side, size, shares, level, split, name, force; did you mean 'size'?",
        ),
    ],
)
def test_refusals(words, wanted):
    with pytest.raises(ConfigError, match=line(wanted)):
        parse(Options, "go", words)


def test_a_tuple_takes_all_values():
    @dataclass(frozen=True)
    class Many:
        runs: tuple[Path, ...] = field(metadata={"positional": "RUN"})
        out: Path | None = None

    options, rest = parse(Many, "go", ["x", "out=z", "lr=0.1", "~augment.ops.flip", "~no-such-user/x"])
    assert (options, rest) == (Many((Path("x"), Path("~no-such-user/x")), Path("z")), ["lr=0.1", "~augment.ops.flip"])


def test_help():
    options = {option.name: option for option in options_of(Options)}
    assert [option.usage for option in options.values()] == [
        "RUN",
        "side=NAME",
        "size=N",
        "shares=X[,...]",
        "level=auto|none|N",
        "split=train|val",
        "name=TEXT",
        "--force",
    ]
    assert options["side"].meaning == "on which side, in more words than fit in a line."
    assert options["size"].meaning == options["shares"].meaning == "how much."
    assert options["name"].meaning == ""
