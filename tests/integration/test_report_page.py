"""The report's page in a real browser: it loads from a file, without a network, and does what it promises."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audited import make_audit
from diagnoses import DECODE, EVALUATION, efficiency
from folders import HOSTILE, make_run, make_troubled_sweep

from effloop.audit import page as audits
from effloop.audit.findings import KINDS
from effloop.measure.pictures import write_diagnosis
from effloop.record.efficiency import Verdict
from effloop.report.files import write_report
from effloop.runs.reader import find_runs

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five jobs, two with scores that count, and a run from elsewhere; names and values are hostile."""
    folder = tmp_path_factory.mktemp("runs") / "<img src=x onerror=document.title='taken'>"
    make_troubled_sweep(folder)
    make_run(folder / "seven", f'data.root="{HOSTILE}"', "lr=0.5", epochs=3)
    for name, told in (("0", DECODE), ("seven", EVALUATION)):
        hostile = efficiency(replace(told, verdict=Verdict("decode", f"held back by {HOSTILE}")))
        (folder / name / "efficiency.json").write_text(json.dumps(hostile))
    write_report(find_runs([folder / name for name in "01234"] + [folder / "seven"]), folder, "val/top1", HOSTILE)
    return folder / "report.html"


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    return browser


def column(browser: Any, name: str) -> list[str]:
    """The cells of the table below a heading, from top to bottom."""
    heads = [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".sortable thead th")]
    rows = browser.find_elements(By.CSS_SELECTOR, ".sortable tbody tr")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[heads.index(name)].text for row in rows]


def head(browser: Any, name: str) -> Any:
    return browser.find_element(By.XPATH, f"//thead//th[button[text()='{name}']]")


@pytest.mark.slow
def test_loads_without_an_error_or_a_request(opened):
    assert opened.get_log("browser") == []
    assert opened.title == HOSTILE
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert opened.find_elements(By.TAG_NAME, "img") == []
    assert len(opened.find_elements(By.TAG_NAME, "script")) == 1
    text = opened.find_element(By.TAG_NAME, "body").text
    assert f"failed: it ended with signal 9 {HOSTILE}" in text
    assert "6 runs: 3 done, 1 failed, 1 killed, 1 running" in text
    assert text.count(f"held back by {HOSTILE}") == 2


def test_policy_forbids_the_network_and_other_scripts(opened):
    refused = opened.execute_async_script("""
        const done = arguments[0], refused = [];
        document.addEventListener("securitypolicyviolation", (event) => {
            if (refused.push(event.effectiveDirective) === 2) done(refused.sort());
        });
        document.body.append(Object.assign(new Image(), {src: "http://127.0.0.1:9/a.png"}));
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken'";
        document.body.append(script);
    """)
    assert refused == ["img-src", "script-src-elem"]
    assert opened.title == HOSTILE


@pytest.mark.nightly
def test_sorts_numbers_both_ways_and_what_is_unknown_last(opened):
    assert column(opened, "lr") == ["0.003", "0.01", "0.5", "20.0", "0.1", "-"]  # the best first
    head(opened, "lr").click()
    assert head(opened, "lr").get_attribute("aria-sort") == "ascending"
    assert column(opened, "lr") == ["0.003", "0.01", "0.1", "0.5", "20.0", "-"]
    head(opened, "lr").click()
    assert head(opened, "lr").get_attribute("aria-sort") == "descending"
    assert column(opened, "lr") == ["20.0", "0.5", "0.1", "0.01", "0.003", "-"]

    head(opened, "images/s").find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert head(opened, "lr").get_attribute("aria-sort") is None
    assert column(opened, "images/s") == ["600", "750", "900", "-", "-", "-"]
    head(opened, "images/s").find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert column(opened, "images/s") == ["900", "750", "600", "-", "-", "-"]
    head(opened, "state").click()
    states = [each.removeprefix("best ") for each in column(opened, "state")]
    assert states == ["done", "done", "done", "failed", "killed", "running"]


@pytest.mark.parametrize("width", [390, 1100])
def test_diagnosis_loads_without_an_error_or_a_request(browser, tmp_path, width):
    write_diagnosis(replace(DECODE, findings=[HOSTILE]), tmp_path)
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # what the tests before have left there
    try:
        browser.get((tmp_path / "diagnosis.html").as_uri())
        assert browser.get_log("browser") == []
        assert browser.title == "Diagnosis"
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        shown, side = (".track > span", "width") if width < 800 else (".pipe", "height")
        sizes = [each.rect[side] for each in browser.find_elements(By.CSS_SELECTOR, shown)]
        assert len(sizes) == 7  # storage, decode, augment, batch; transfer, step, log
        assert min(sizes) > 0
        tank = browser.find_element(By.CSS_SELECTOR, ".wait .tank")
        filled = tank.find_element(By.TAG_NAME, "span").rect[side] / tank.rect[side]
        assert filled == pytest.approx(DECODE.wait, abs=0.03)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [390, 1280])
def test_audit_loads_without_an_error_or_a_request(browser, tmp_path, width):
    """Of hostile names, labels and texts; all pictures are seen, and two are beside each other on a phone."""
    found = make_audit(tmp_path / "data")
    written = tmp_path / "audit.html"
    audits.write(found, written, tmp_path / "audit.csv", f"effloop '{HOSTILE}'", 1)
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # what the tests before have left there
    try:
        browser.get(written.as_uri())
        assert browser.get_log("browser") == []
        assert browser.title == f"Audit of {tmp_path}/data"
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        sizes = browser.execute_async_script("""
            const done = arguments[0], images = [...document.images];
            images.forEach((image) => image.loading = "eager");
            Promise.all(images.map((image) => image.decode())).then(
                () => done(images.map((image) => [image.naturalWidth, image.naturalHeight, image.src.slice(0, 16)])));
        """)
        assert {kind for *_, kind in sizes} == {"data:image/jpeg;"}
        assert {(107, 160), (160, 107), (160, 16)} == {(width, height) for width, height, _ in sizes}
        entries = "return performance.getEntriesByType('resource').filter((each) => !each.name.startsWith('data:'))"
        assert browser.execute_script(entries) == []
        assert [each.get_attribute("id") for each in browser.find_elements(By.CSS_SELECTOR, "section[id]")] == [*KINDS]
        leaks = browser.find_elements(By.CSS_SELECTOR, "#leak figure")
        assert len(leaks) == 8  # each shows 6 of its 9 images
        assert "and 3 more" in leaks[0].text
        assert "The table has 41 more." in browser.find_element(By.ID, "leak").text
        first, second = (each.rect for each in leaks[0].find_elements(By.CSS_SELECTOR, ".picture")[:2])
        assert (first["y"], second["x"] > first["x"]) == (second["y"], True)
        assert browser.find_elements(By.CSS_SELECTOR, ".none")
        assert browser.title == f"Audit of {tmp_path}/data"  # no name or text has changed it
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
