"""A diagnosis in the terminal, as JSON, as a plot and as a page."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from diagnoses import DECODE, EVALUATION
from folders import HOSTILE, make_run
from PIL import Image

from effloop.errors import ConfigError
from effloop.report.diagnosis import print_diagnosis, write_diagnosis
from effloop.report.diagnosis_page import render_diagnosis
from effloop.report.files import write_report
from effloop.report.pipeline import format_gain, format_rate, format_share, read_facts, read_pipeline
from effloop.runs.reader import find_runs, read_run

_VOID = {"meta"}
_MARKED = {"compute": "step", "sync": "step", "logging": "log", "decode": "decode", "?": "decode"}
_STEP = {"name": "step", "images_per_s": 640.0}


class _Page(HTMLParser):
    """Text and tags; a tag that isn't closed, or closed without being open, fails."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def hostile(value: Any) -> Any:
    """Every text replaced by one that would do something if it weren't escaped."""
    if isinstance(value, dict):
        return {key: hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return f"{HOSTILE}\x1b[31m\n[red]\"'\ud800$" if isinstance(value, str) else value


def printed(result: dict[str, Any], width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        print_diagnosis(result)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_reads_stages() -> None:
    pipeline = read_pipeline(DECODE)
    assert [stage.name for stage in pipeline.loading] == ["storage", "decode", "augment", "batch"]
    assert [stage.name for stage in pipeline.training] == ["transfer", "step", "log"]
    assert [stage.name for stage in pipeline.stages if stage.marked] == ["decode"] == [pipeline.marked]
    sizes = {stage.name: stage.size for stage in pipeline.rows}
    assert sizes["loop"] == min(sizes.values())
    assert sizes["batch"] == 1.0  # more than a hundred times the slowest
    assert sizes["decode"] < sizes["step"] < sizes["augment"] < sizes["storage"] < 1
    assert read_pipeline(EVALUATION).marked == "evaluation"


@pytest.mark.parametrize(
    ("bound", "marked"), [("compute", "step"), ("sync", "step"), ("logging", "log"), ("?", "decode")]
)
def test_marks_what_the_verdict_names_or_the_slowest(bound: str, marked: str) -> None:
    assert read_pipeline({**DECODE, "verdict": {"bound": bound}}).marked == marked


def test_reads_a_runs_efficiency() -> None:
    seconds = {"build": 9.0, "step": 60.0, "wait": 20.0, "evaluation": 20.0}
    found = {"images_per_s": 900.0, "wait": 0.25, "seconds": seconds, "override": DECODE["overrides"][0]}
    pipeline = read_pipeline(found)
    assert (pipeline.rate, pipeline.wait, pipeline.evaluation) == (900.0, 0.25, 0.2)
    assert [each.text for each in pipeline.overrides] == ["data.cache=pixels"]
    assert pipeline.is_known
    assert not read_pipeline({**found, "override": None}).is_known


def test_formats_numbers() -> None:
    assert [*map(format_rate, (41000.4, 12.6, 0.26, math.nan, math.inf))] == ["41,000", "13", "0.3", "-", "-"]
    assert [*map(format_gain, (1.584, 16.6, math.nan))] == ["1.58x", "17x", "-"]
    assert [*map(format_share, (0.0, 0.004, 0.412, 1.0, math.nan))] == ["0 %", "0.4 %", "41 %", "100 %", "-"]


def test_facts() -> None:
    assert read_facts(DECODE) == [
        ("data", "1,515 images in 10 classes, /data/pets/train"),
        ("model", "small_resnet, 64 px, batch_size=32, fp32"),
        ("loader", "threads, num_workers=2"),
        ("machine", "NVIDIA H200, 2 cores"),
        ("date", "2026-11-22 18:40"),
    ]


@pytest.mark.parametrize("width", [80, 100])
def test_prints_stages_in_order_with_the_wait_between(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(DECODE, width, capsys)
    assert all(len(line) <= width for line in lines)
    names = [found[1] for line in lines if (found := re.match(r" (?:= )?([a-z]+)(?: ◀)? +[\d,]+", line))]
    assert " ".join(names) == "storage decode augment batch loader wait transfer step log loop evaluation"
    text = "\n".join(lines)
    assert "\x1b" not in text  # no colours in a pipe
    assert next(line.split()[:3] for line in lines if "◀ " in line) == ["decode", "◀", "1,210"]
    assert re.search(r"wait +41 % +░", text)
    assert " ".join(DECODE["verdict"]["line"].split()) in " ".join(text.split())
    assert re.search(r"1 +data.cache=pixels +1,890 +1,811 +1.82x", text)
    assert re.search(r"3\* +decode=turbojpeg +1,102 +- ", text)
    assert "as measured here on 2026-11-20" in " ".join(text.split())
    assert "* changes what is trained" in text


def test_prints_hostile_text_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join("".join(printed(hostile(DECODE), 100, capsys)).split())
    assert "\x1b" not in text
    assert "[red]" in text


def test_writes_three_files(tmp_path: Path) -> None:
    write_diagnosis({**DECODE, "rate": math.nan}, tmp_path / "new/folder")
    folder = tmp_path / "new/folder"
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.html", "diagnosis.json", "diagnosis.png"]
    assert json.loads((folder / "diagnosis.json").read_text()) == {**DECODE, "rate": None}
    with Image.open(folder / "diagnosis.png") as image:
        assert image.size[0] == 1500
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10  # something is drawn
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        write_diagnosis(DECODE, tmp_path / "file")


def test_page_tells_everything() -> None:
    page = _Page(render_diagnosis(DECODE))
    wanted = [DECODE["verdict"]["line"], *DECODE["findings"], "41 % of the loop", "8 % of an epoch"]
    wanted += [each[key] for each in DECODE["overrides"] for key in ("override", "why")]
    wanted += ["1,890", "1,811", "1.82x", "changes what is trained", "as measured here on 2026-11-20"]
    wanted += [stage["detail"] for stage in DECODE["stages"]]
    wanted += ["effloop data.root=/data/pets num_workers=2", "activations", "71.0 GB of 69.0 GB free too little"]
    assert [text for text in wanted if text not in page.text] == []


def test_page_loads_nothing_and_runs_nothing() -> None:
    page = _Page(render_diagnosis(DECODE))
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(page.tags)
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert not re.search(r"url\(|@import|https?://", render_diagnosis(DECODE))


def test_page_escapes_whatever_it_is_given() -> None:
    told = hostile(DECODE)
    told["stages"] = [{**each, "name": f"{HOSTILE}{number}"} for number, each in enumerate(told["stages"])]
    told["memory"]["total"] = {HOSTILE: 1}
    text = render_diagnosis(told)
    page = _Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(HOSTILE) > 20
    assert "\x1b" not in text
    text.encode()


def without_each(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Copies that lack a key, or have a value of another type there."""
    found: list[dict[str, Any]] = [{}]
    for key in result:
        found.append({name: value for name, value in result.items() if name != key})
        found += [{**result, key: value} for value in ("text", [None, 3, {}], -1)]
    for key in ("stages", "overrides"):
        for name in result[key][1]:
            copy = deepcopy(result)
            del copy[key][1][name]
            found.append(copy)
    return found


def test_whatever_is_missing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    for result in without_each(DECODE):
        _Page(render_diagnosis(result))
        print_diagnosis(result)
    for number in (0, -1.0, math.inf, math.nan, True, "1"):
        override = {"override": "a=b", "images_per_s": number, "measured": number, "gain": number}
        for rate in (number, 1.0):
            result = {"stages": [{"name": "step", "images_per_s": number}], "wait": number, "images_per_s": rate}
            page = render_diagnosis({**result, "evaluation": number, "overrides": [override]})
            assert not re.search(r"(width|share):(nan|inf|-)", page)
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"stages": [_STEP]},
        {"stages": [{"name": "log"}], "wait": 0.5},
        hostile(DECODE),
    ],
    ids=["nothing", "one stage", "no rate", "hostile"],
)
def test_draws_what_there_is(tmp_path: Path, result: dict[str, Any]) -> None:
    write_diagnosis(result, tmp_path)
    with Image.open(tmp_path / "diagnosis.png") as image:
        assert 100 < image.size[1] < 2000


def test_report_of_a_run_shows_the_pipeline(tmp_path: Path) -> None:
    write_efficiency(make_run(tmp_path / "a"), DECODE)
    page = report(tmp_path, "a")
    assert "Where the pipeline is held back" in page.text
    assert DECODE["verdict"]["line"] in page.text
    assert "data.cache=pixels → 1,890 images/s (1.82x)" in page.text
    assert page.text.count("storage") == 1


@pytest.mark.slow
def test_report_of_several_runs_has_a_row_for_each_up_to_eight(tmp_path: Path) -> None:
    names = [*"abcdefghij"]
    for number, name in enumerate(names):
        folder = make_run(tmp_path / name, f"lr=0.{number + 1}")
        told = {**DECODE, "verdict": {"bound": "decode", "line": f"verdict {name} {HOSTILE}"}}
        write_efficiency(folder, told)
        (folder / "metrics.jsonl").unlink()
        (folder / "perf.jsonl").unlink()
    (tmp_path / "j/efficiency.json").write_text('{"stages": [')  # as a full disk leaves it
    page = report(tmp_path, *names)
    assert len(re.findall(r"verdict \w ", page.text)) == 8
    assert "… and 1 more" in page.text
    assert "img" not in page.tags
    assert read_run(tmp_path / "j").efficiency == {}


def test_report_of_runs_of_before_has_no_such_section(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    write_efficiency(make_run(tmp_path / "b"), {"images_per_s": 900.0, "wait": 0.1})
    assert "held back" not in report(tmp_path, "a", "b").text


def write_efficiency(folder: Path, result: dict[str, Any]) -> None:
    told = {key: result[key] for key in ("images_per_s", "wait", "stages", "verdict") if key in result}
    told["override"] = result.get("overrides", [None])[0]
    (folder / "efficiency.json").write_text(json.dumps(told))


def report(folder: Path, *names: str) -> _Page:
    write_report(find_runs([folder / name for name in names]), folder / "out", "val/top1", "title")
    return _Page(re.sub(r"<!DOCTYPE html>|<(path|use|rect)[^>]*/>", "", (folder / "out/report.html").read_text()))
