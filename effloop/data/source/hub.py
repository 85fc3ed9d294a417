"""Datasets of Hugging Face's hub: fetched into the hub's own cache, and read there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

from effloop.data.source import parquet_files
from effloop.data.source.auto import format_of
from effloop.data.source.base import Source, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.formats.parquet import ParquetConfig
from effloop.data.source.root import CARD
from effloop.data.source.storage.loose import ENDINGS
from effloop.errors import ConfigError, DataError, optional_package

_TABLES = ("*metadata.csv", "*metadata.jsonl")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIX = "hf://datasets/"


@dataclass
class HubConfig(ParquetConfig):
    """Fields of `data=hf`; `root` is ORG/NAME.

    Attributes:
        revision: a branch, a tag or a commit; null is the main branch. A run keeps the commit that it was when it
            began.
    """

    root_is_path = False

    revision: str | None = None

    def __post_init__(self) -> None:
        if self.root:
            self.root = self.root.removeprefix(_PREFIX)
        super().__post_init__()

    def pinned(self) -> Mapping[str, Any]:
        return {"revision": _fetch(self.root, self.revision, [CARD]).name}

    def found(self) -> DataConfig:
        once = self.revision is not None and _COMMIT.fullmatch(self.revision)
        folder = (_snapshot_of_commit if once else _snapshot)(self.root, self.revision, self.subset)
        of = sources[name := self._format_of(folder)].config
        common = {each.name for each in fields(DataConfig)}
        known = {each.name for each in fields(of)} & {each.name for each in fields(self)} - {"name", "root"}
        # What is null here is the format's own default there.
        given = {key: value for key in known if (value := getattr(self, key)) is not None or key in common}
        config = of(**{**given, "name": name, "root": str(folder)})
        assert isinstance(config, DataConfig)
        return config

    def _format_of(self, folder: Path) -> str:
        files = [*folder.rglob(f"*{parquet_files.ENDING}")]
        if self.subset is None and files and parquet_files.first_file(folder) is None:
            have = sorted({file.relative_to(folder).parts[0] for file in files})
            raise ConfigError(
                f"data.subset: '{self.root}' has several: {', '.join(have[:8])}; set data=hf data.subset=NAME"
            )
        if self.subset is not None:
            return "parquet"
        return "tar" if any(folder.rglob("*.tar")) else format_of(folder) or "parquet"


@sources.register("hf", HubConfig)
def open_source(config: HubConfig, split: str) -> Source:
    """A dataset of Hugging Face's hub: parquet files, tar shards or a folder of images."""
    return sources.build(config.found(), split)


def _snapshot(root: str | None, revision: str | None, subset: str | None) -> Path:
    """The folder with the files of a dataset, whose name is the commit."""
    folder = _fetch(root, revision, [CARD])
    parquet = parquet_files.patterns(folder, subset) or [
        f"{subset}/*{parquet_files.ENDING}" if subset else f"*{parquet_files.ENDING}"
    ]
    beside = [CARD] if subset else [CARD, "*.index", "classes.txt", "targets.json"]
    images = [f"*{ending}" for each in ENDINGS for ending in (each.decode(), each.decode().upper())]
    for patterns in (parquet,) if subset else (parquet, ["*.tar"], [*images, *_TABLES]):
        folder = _fetch(root, revision, [*beside, *patterns])
        if any(file.match(pattern) for file in folder.rglob("*") for pattern in ("*.parquet", "*.tar", *images)):
            return folder
    what = f"no parquet files of data.subset={subset}" if subset else "no parquet files, tar shards or images"
    raise DataError(
        f"data.root: '{root}' on {_constants().ENDPOINT} has {what}; name another one, or see whether the hub has made "
        "parquet of it: data.revision=refs/convert/parquet"
    )


_snapshot_of_commit = cache(_snapshot)


def _fetch(root: str | None, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of the hub's cache, with all files of a dataset in it that match."""
    hub: Any = optional_package("huggingface_hub", "data=hf", "effloop[hf]")
    if not root:
        raise ConfigError("data.root is missing; data=hf needs it: set data.root=ORG/NAME")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # nothing is said of patterns that no file matches
    utils: Any = optional_package("huggingface_hub.utils", "data=hf", "effloop[hf]")
    no_bar = type("NoBar", (utils.tqdm,), {"__init__": partialmethod(utils.tqdm.__init__, disable=True)})
    with _one_line(root, revision):
        found = hub.snapshot_download(
            root,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[*patterns],
            library_name="effloop",
            tqdm_class=no_bar if patterns == [CARD] else None,
        )
        return Path(found)


@contextmanager
def _one_line(root: str, revision: str | None) -> Iterator[None]:
    """Makes an error of the hub one that says what to do."""
    errors: Any = optional_package("huggingface_hub.errors", "data=hf", "effloop[hf]")
    what, where, cache_folder = f"data.root: '{root}'", _constants().ENDPOINT, _constants().HF_HUB_CACHE
    messages = {
        "HFValidationError": f"{what} is no name of a dataset; set data.root=ORG/NAME",
        "RevisionNotFoundError": f"data.revision: '{revision}' is no branch, tag or commit of '{root}' on {where}; set "
        "one, or null",
        "RepositoryNotFoundError": f"{what} is not on {where}, or not for everybody; correct the name, or accept its "
        "conditions there and set HF_TOKEN to a token that may read it",
        "LocalEntryNotFoundError": f"{what} is not in the cache {cache_folder}, or not all of it, and {where} can't be "
        "reached{}; fetch it where there is a network, or set HF_HUB_CACHE=FOLDER",
        "HTTPError": f"{what} can't be fetched from {where}{{}}; try again",
    }
    try:
        yield
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        names = [base.__name__ for base in type(error).__mro__]
        message = next(text for name, text in messages.items() if name in (*names, "HTTPError"))
        text = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(message.replace("{}", f" ({text})" if text else "")) from None


def _constants() -> Any:
    return optional_package("huggingface_hub.constants", "data=hf", "effloop[hf]")
