"""Outputs that are URLs: written to a folder of this machine, and uploaded when they are complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.convert.disk import unwritable
from effloop.convert.options import ConvertOptions
from effloop.convert.workfolder import WorkFolder
from effloop.data.remote.location import Url
from effloop.data.remote.send import There, look, send
from effloop.data.remote.store import MOST_FILES
from effloop.errors import ConfigError

_ROOM = "data.download_dir=FOLDER"


class Uploads:
    """Where outputs go.

    Args:
        urls: of the outputs.
        folder: for the work.
    """

    def __init__(self, urls: Sequence[Url], folder: Path) -> None:
        self.urls = urls
        name = re.sub(r"[^A-Za-z0-9.]+", "-", urls[0].name)[:100]
        self.path = folder / "upload" / f"{name}-{hashlib.sha256(urls[0].encode()).hexdigest()[:16]}.partial"
        self._there: dict[Url, There] = {}

    def begin(self) -> None:
        """Look at the URLs, and make the folder.

        Raises:
            ConfigError: something is there, unless a conversion of this machine may have uploaded it and isn't done; or
                the folder can't be made.
            DataError: a URL can't be written.
        """
        for url in self.urls:
            if self.there(url).whole and not self.path.exists():
                raise ConfigError(f"out: {url} is there already, and nothing is overwritten; remove it or set out=URL")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path.parent, error, _ROOM) from None

    def check_count(self, files: int) -> None:
        """Refuse so many files that nothing would read them.

        Raises:
            ConfigError: they are too many.
        """
        if files > MOST_FILES:
            raise ConfigError(
                f"to: a folder of {files:,} files can't be read behind a URL, which may have {MOST_FILES:,}; set to=tar"
            )

    def there(self, url: Url) -> There:
        """What was there when it was looked at."""
        if url not in self._there:
            self._there[url] = look(url)
        return self._there[url]


def uploads_of(options: ConvertOptions, folder: Path) -> Uploads | None:
    """The uploads of a conversion, begun; None if its outputs stay on this machine.

    Args:
        options: of the conversion.
        folder: for the work.

    Raises:
        ConfigError, DataError: as `Uploads.begin`.
    """
    urls = [out for out in options.outputs if isinstance(out, Url)]
    if not urls:
        return None
    uploads = Uploads(urls, folder)
    uploads.begin()
    return uploads


class UploadFolder(WorkFolder):
    """The work folder of outputs that are uploaded when they are complete.

    Args:
        uploads: where they go.
        job: as of `WorkFolder`.
        contents: what determines the bytes of the outputs, on any machine: whoever has the same may go on with an
            upload.
    """

    example, room = "out=URL", _ROOM

    def __init__(self, uploads: Uploads, job: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
        super().__init__(uploads.urls, job, uploads.path)
        self._uploads = uploads
        self._digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    def __enter__(self) -> UploadFolder:
        for url in self._uploads.urls:
            if self._uploads.there(url).job not in (None, self._digest):
                raise ConfigError(
                    f"out: {url} has what another conversion has uploaded and not completed; remove it or set out=URL"
                )
        super().__enter__()
        return self

    def _exists(self, out: Path | Url) -> bool:
        return self._uploads.there(Url(out)).whole

    def _place(self, done: Path, out: Path | Url) -> None:
        url = Url(out)
        print(send(done, url, self._digest).line(url))
        os.rename(done, self.writing(out))  # at once: half of it would be another output
        self.discard()
