"""Listings as web servers write them."""

import pytest

from effloop.data.remote.listing import Links, names_in, names_in_json

NGINX = """<html><head><title>Index of /set/</title></head><body><h1>Index of /set/</h1><hr><pre><a href="../">../</a>
<a href="train/">train/</a>                               23-Nov-2026 13:43                   -
<a href="a%20b.tar">a b.tar</a>                           23-Nov-2026 13:43                1024
</pre><hr></body></html>"""
APACHE = """<table><tr><th><a href="?C=N;O=D">Name</a></th></tr><tr><td><a href="/">Parent Directory</a></td></tr>
<tr><td><a href="train/">train/</a></td></tr><tr><td><a href="a%20b.tar">a b.tar</a></td></tr></table>"""
OTHERS = """<a href="https://elsewhere/x.tar">x</a><a href="/set/train/">train</a><a href="./a%20b.tar">a</a>
<a href="mailto:me">me</a><a href="#top">top</a><a href="../up.tar">up</a><a href="deep/x.tar">deep</a>"""


@pytest.mark.parametrize("page", [NGINX, APACHE, OTHERS])
def test_names_in_a_folders_page(page):
    links = Links()
    links.feed(page)
    assert links.names("/set/") == ["train/", "a b.tar"]


@pytest.mark.parametrize(
    "listed",
    [
        ["a.tar", "b/c.tar"],
        [{"name": "a.tar", "size": 3}, {"name": "b/c.tar"}],
        {"shardlist": [{"url": "a.tar", "nsamples": 3}, {"url": "b/c.tar"}]},
    ],
)
def test_names_in_an_index(listed):
    assert [*names_in(listed)] == ["a.tar", "b/c.tar"]


@pytest.mark.parametrize(
    "listed", [{}, "a.tar", [3], ["../a.tar"], ["/a.tar"], [{"size": 3}], ["https://h/a.tar"], ["\ud800"]]
)
def test_what_is_no_index_is_refused(listed):
    with pytest.raises(ValueError, match=r"^$"):
        [*names_in(listed)]


def test_names_in_a_listing_in_json():
    rows = [{"name": "train", "type": "directory"}, {"name": "a b.tar"}, {"name": 3}, {}, "x", {"name": "../up.tar"}]
    assert names_in_json(rows) == ["train/", "a b.tar"]
    for rows in (3, {"name": "a.tar"}):
        with pytest.raises(ValueError, match=r"^$"):
            names_in_json(rows)
