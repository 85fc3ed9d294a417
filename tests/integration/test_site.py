"""The documentation as a site: it builds, fits a phone and a desk, and is searched."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

WIDER = """return [document.scrollingElement.scrollWidth - document.documentElement.clientWidth,
    [...document.images].filter(image => !image.naturalWidth).map(image => image.src)]"""
"""Pixels by which a page is wider than the window, and pictures that aren't there."""
LINKS = "return [...document.links].map(link => link.href.split('#')[0])"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Its address and its pages."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    pages = [str(page.parent.relative_to(folder)) for page in folder.rglob("index.html")]
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()


@pytest.mark.parametrize("width", [390, 1300])
def test_pages_are_as_wide_as_the_window(site, browser, width):
    address, pages = site
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    found, links = {}, set()
    for page in pages:
        browser.get(f"{address}/{page}/")
        found[page] = browser.execute_script(WIDER)
        links |= {link for link in browser.execute_script(LINKS) if link.startswith(address)}
    assert {page: each for page, each in found.items() if each != [0, []]} == {}
    there = {f"{address}/{page}/".replace("/./", "/") for page in pages}
    assert {link for link in links if link.replace("/./", "/") not in there} == set()
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_search_finds(site, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{site[0]}/start/")
    browser.find_element(By.CLASS_NAME, "md-search__input").send_keys("cross-validation")
    links = WebDriverWait(browser, 30).until(lambda it: it.find_elements(By.CLASS_NAME, "md-search-result__link"))
    assert any("/sweeps/" in link.get_attribute("href") for link in links)


def test_examples_and_python_are_on_their_pages(site, browser):
    browser.get(f"{site[0]}/examples/")
    assert "run_in_threadpool" in browser.page_source  # of serve.py
    browser.get(f"{site[0]}/python/")
    assert "Predictor" in browser.page_source
    assert {"start", "gallery", "keys", "changelog"} <= set(site[1])
