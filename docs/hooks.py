"""Hooks of MkDocs: pages that are made of files elsewhere, so that nothing stands in two places."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import effloop

_ROOT = Path(__file__).parents[1]
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LANGUAGES = {".py": "python", ".sh": "sh"}
_RETURNED = {
    "effloop.data.loader.Loader": ("epoch", "classes", "samples"),
    "effloop.train.trainer.Trainer": ("fit",),
    "effloop.inference.predict.Predictor": ("predict", "preprocess"),
}
"""What the functions of `effloop.__all__` return -> what is called of it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, the changelog, the contributors' page, and a page of what `effloop.__all__` names."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=_relinked((_ROOT / name).read_text("utf-8"))))
    files.append(File.generated(config, "python.md", content=_python()))
    return files


def _python() -> str:
    parts = ["# Python", "What `import effloop` offers; the fields of `Config` are the [keys](keys.md)."]
    for name in effloop.__all__:
        options = "\n    options: { show_docstring_attributes: false }" if name == "Config" else ""
        parts.append(f"::: effloop.{name}{options}")
    for name, members in _RETURNED.items():
        parts.append(f"::: {name}\n    options: {{ members: [{', '.join(members)}], show_root_full_path: false }}")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links out of this folder are links to those pages; an example that has a line of its own is shown there."""
    return re.sub(r"^\[\S+\]\((examples/\S+)\)$", _shown, _relinked(markdown), flags=re.MULTILINE)


def _shown(link: re.Match[str]) -> str:
    file = _ROOT / "docs" / link[1]
    return f'```{_LANGUAGES[file.suffix]} title="docs/{link[1]}"\n{file.read_text("utf-8")}```'


def _relinked(text: str) -> str:
    for name, page in _PAGES.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(name)}", f"]({page}", text)
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")
