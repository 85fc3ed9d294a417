"""Draw `throughput.svg` for the README from the tables in benchmarks.md: `python docs/throughput.py`."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
OURS, OTHERS = "#2f6fd0", "#b4bcc8"
LOADERS = {
    "EffLoop, `engine=processes`": "EffLoop (processes)",
    "EffLoop, `engine=threads`": "EffLoop (threads)",
    "torchvision v2, uint8 (ImageFolder, DataLoader)": "torchvision v2",
    "DALI on the CPU": "DALI (CPU)",
    "torchvision, Pillow (ImageFolder, DataLoader)": "torchvision, Pillow",
}
PAYLOADS = {
    "500x375, quality 90": "JPEG, 500 px",
    "256x192, quality 90": "JPEG, 256 px",
    "500x375, raw": "raw, 500 px",
    "256x192, raw": "raw, 256 px",
}


def table(heading: str) -> dict[str, list[float]]:
    """{first cell: the first number of each other cell} of the table in benchmarks.md with this first heading."""
    text = (FOLDER / "benchmarks.md").read_text("utf-8")
    lines = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: [float(re.findall(r"[\d,.]+", cell)[0].replace(",", "")) for cell in row[1:]] for row in rows}


def bars(axes: Axes, labels: list[str], series: dict[str, list[float]], colours: list[str]) -> None:
    """Horizontal bars with their values, one group for each label."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * height for place in range(len(labels))]
        axes.barh(places, values, height * 0.92, label=name, color=colours if len(series) == 1 else colours[number])
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:,.0f}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(max(values) for values in series.values()))
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def main() -> None:
    """Write the picture."""
    mpl.rcParams |= {"svg.hashsalt": "effloop", "font.size": 10}
    figure = Figure(figsize=(9.4, 2.9), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    plain = table("plain files")
    values = [plain[name][0] for name in LOADERS]
    bars(left, list(LOADERS.values()), {"": values}, [OURS, OURS, OTHERS, OTHERS, OTHERS])
    left.set_title("A folder of JPEGs, images/s", fontsize=11, loc="left")
    payload = table("payload")
    series = {
        "EffLoop (processes)": [payload[name][1] for name in PAYLOADS],
        "FFCV": [payload[name][2] for name in PAYLOADS],
    }
    bars(right, list(PAYLOADS.values()), series, [OURS, OTHERS])
    right.set_title("Packed beforehand, images/s", fontsize=11, loc="left")
    right.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(FOLDER / "throughput.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
