"""A diagnosis in the terminal, as JSON, as a plot and as a page; and what a report shows of a run's stages."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from diagnoses import DECODE, EVALUATION, efficiency
from folders import HOSTILE, make_run

from effloop.errors import ConfigError
from effloop.measure.diagnose import Diagnosis
from effloop.measure.pictures import Pipeline, print_diagnosis, render_diagnosis, write_diagnosis
from effloop.record.efficiency import Override, Stage, Verdict
from effloop.report.files import write_report
from effloop.runs.reader import find_runs

_VOID = {"meta"}
TEXT = f"{HOSTILE}\x1b[31m\n[red]\"'$"
STRANGE = replace(
    DECODE,
    data=TEXT,
    verdict=Verdict("decode", TEXT),
    findings=[TEXT],
    stages=[Stage(stage.name, stage.images_per_s, TEXT) for stage in DECODE.stages],
    overrides=[Override(HOSTILE, HOSTILE, False, 1.0, 1.0, 1.0, [HOSTILE])],
)


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


def printed(found: Diagnosis, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        print_diagnosis(found)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_stages():
    pipeline = Pipeline(DECODE)
    assert [stage.name for stage in pipeline.loading] == ["storage", "decode", "augment", "batch"]
    assert [stage.name for stage in pipeline.training] == ["transfer", "step", "log"]
    assert [stage.name for stage in pipeline.rows if stage.marked] == ["decode"] == [pipeline.marked]
    sizes = {stage.name: stage.size for stage in pipeline.rows}
    assert sizes["loop"] == min(sizes.values())
    assert sizes["batch"] == 1.0  # more than a hundred times the slowest
    assert sizes["decode"] < sizes["step"] < sizes["augment"] < sizes["storage"] < 1
    assert Pipeline(EVALUATION).evaluation_marked
    for bound, marked in {"compute": "step", "sync": "step", "logging": "log"}.items():
        assert Pipeline(replace(DECODE, verdict=Verdict(bound, ""))).marked == marked


@pytest.mark.parametrize("width", [80, 100])
def test_prints_stages_in_order_with_the_wait_between(width, capsys):
    lines = printed(DECODE, width, capsys)
    assert all(len(line) <= width for line in lines)
    names = [found[1] for line in lines if (found := re.match(r" (?:= )?([a-z]+)(?: ◀)? +[\d,]+", line))]
    assert " ".join(names) == "storage decode augment batch loader wait transfer step log loop evaluation"
    text = "\n".join(lines)
    assert "\x1b" not in text  # no colours in a pipe
    assert next(line.split()[:3] for line in lines if "◀ " in line) == ["decode", "◀", "1,210"]
    assert re.search(r"wait +41 % +░", text)
    assert " ".join(DECODE.verdict.line.split()) in " ".join(text.split())
    assert re.search(r"1 +data.cache=pixels +1,040 → 1,890 +1.82x", text)
    assert re.search(r"3\* +decode.dct_scaling=true +1,040 → 1,102 ", text)
    assert "* changes what is trained" in text
    strange = "".join("".join(printed(STRANGE, width, capsys)).split())
    assert "\x1b" not in strange
    assert "[red]" in strange


def test_writes_its_files(tmp_path):
    folder = tmp_path / "new/folder"
    write_diagnosis(replace(DECODE, evaluation=math.nan), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.html", "diagnosis.json"]
    plain = json.loads((folder / "diagnosis.json").read_text())
    assert plain == {**json.loads(json.dumps(DECODE.to_json())), "evaluation": None}
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        write_diagnosis(DECODE, tmp_path / "file")
    write_diagnosis(STRANGE, tmp_path / "strange")


def test_page_has_everything():
    page = _Page(render_diagnosis(DECODE))
    wanted = [DECODE.verdict.line, *DECODE.findings, "41 % of the loop", "8 % of an epoch", "1,040 → 1,890", "1.82x"]
    wanted += [text for each in DECODE.overrides for text in (each.override, each.why)]
    wanted += [stage.detail for stage in DECODE.stages]
    wanted += ["changes what is trained", "effloop data.root=/data/pets num_workers=2"]
    wanted += ["activations", "71.0 GB of 69.0 GB free too little"]
    assert [text for text in wanted if text not in page.text] == []


@pytest.mark.parametrize("found", [DECODE, STRANGE, EVALUATION])
def test_page_loads_nothing_runs_nothing_and_escapes(found):
    text = render_diagnosis(found)
    page = _Page(text)
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(page.tags)
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert not re.search(r"url\(|@import|https?://", text)
    assert "\x1b" not in text
    assert (found is STRANGE) == (page.text.count(HOSTILE) > 10)


def test_a_report_has_the_verdicts(tmp_path):
    told = [
        efficiency(DECODE),
        efficiency(replace(DECODE, verdict=Verdict("x", HOSTILE), overrides=[])),
        {"verdict": 1},
    ]
    for name, found in zip("abc", told, strict=True):
        (make_run(tmp_path / name) / "efficiency.json").write_text(json.dumps(found))
    make_run(tmp_path / "d")
    write_report(find_runs([tmp_path / name for name in "abcd"]), tmp_path / "out", "val/top1", "title")
    page = _Page(re.sub(r"<!DOCTYPE html>|<(path|use|rect)[^>]*/>", "", (tmp_path / "out/report.html").read_text()))
    assert f"{DECODE.verdict.line} Try data.cache=pixels ." in page.text
    assert f": {HOSTILE}" in page.text
    assert "img" not in page.tags
