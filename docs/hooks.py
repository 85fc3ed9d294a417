"""Hooks of MkDocs: pages that are made of files elsewhere, so that nothing stands in two places."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import effloop

_ROOT = Path(__file__).parents[1]
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, the changelog, the contributors' page, and a page of what `effloop.__all__` names."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=_relinked((_ROOT / name).read_text("utf-8"))))
    names = "\n\n".join(f"::: effloop.{name}" for name in effloop.__all__)
    files.append(File.generated(config, "python.md", content=f"# Python\n\n{names}\n"))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links out of this folder are links to those pages."""
    return _relinked(markdown)


def _relinked(text: str) -> str:
    for name, page in _PAGES.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(name)}", f"]({page}", text)
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")
