"""Names of files, as web servers list them: an index in JSON, or the page or JSON of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote


def names_in(listed: Any) -> Iterator[str]:
    """The names in an index: a list of names, or of objects with a name, or WebDataset's `shardlist`."""
    rows = listed.get("shardlist", listed.get("files")) if isinstance(listed, dict) else listed
    if not isinstance(rows, list):
        raise ValueError
    for row in rows:
        name = next((row[key] for key in ("name", "url", "key") if key in row), None) if isinstance(row, dict) else row
        if not isinstance(name, str) or not _is_name(name):
            raise ValueError
        yield name.removeprefix("./")


def names_in_json(rows: Any) -> list[str]:
    """The names in a listing of nginx's, those of folders with `/`; what else is in there is left out."""
    if not isinstance(rows, list):
        raise ValueError
    found = [row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]
    names = [row["name"].rstrip("/") + "/" * (row.get("type") == "directory") for row in found]
    return [name for name in names if _is_name(name.rstrip("/"))]


def _is_name(name: str) -> bool:
    strange = name.startswith("/") or "://" in name or ".." in name.split("/") or re.search("[\ud800-\udfff]", name)
    return bool(name) and not strange


class Links(HTMLParser):
    """The links in a page that lists a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._found += [value for name, value in attrs if name == "href" and value]

    def names(self, folder: str) -> list[str]:
        """Those directly in a folder, which has this path."""
        plain = [unquote(href) for href in self._found if not re.search(r"[?#]|^[a-z]+:", href)]
        names = [href.removeprefix(folder).removeprefix("./") for href in plain]
        return list(dict.fromkeys(name for name in names if _is_name(name) and "/" not in name.rstrip("/")))
