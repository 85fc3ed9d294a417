"""The masks that a table names: decoded once, by all cores, while the table is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from effloop.data.image.mask import MaskFormat
from effloop.data.source.base import Kind, printable
from effloop.data.source.manifest.layout import Part
from effloop.data.source.manifest.targets import Parser
from effloop.data.source.masks.scan import Looked, MaskColumns, in_parallel, look_at_file
from effloop.data.source.tables import Row, encoded
from effloop.errors import DataError


class MaskParser(Parser):
    """Looks at the mask of each row of a table.

    Args:
        part: the table, whose target is the path of a mask.
        form: how stored values become classes.
    """

    def __init__(self, part: Part, form: MaskFormat) -> None:
        super().__init__(Kind.masks, (), "", lambda _: ())
        self.part, self.form = part, form
        self._seen = Looked()

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """The table's rows, in order; `__call__` is about the last one."""
        rows = self.part.rows(*places)
        for row, seen in in_parallel(rows, self._look):
            self._seen = seen
            yield row

    def _look(self, row: Row) -> Looked:
        path = encoded(row[1][1].strip())
        if not path:
            return Looked(wrong="no path of a mask; write one, or leave the row out", there=False)
        return look_at_file(os.path.join(self.part.folder, path), self.form)

    def __call__(self, texts: Sequence[str]) -> tuple[int, bytes]:
        if not self._seen.there:
            raise DataError(f"{printable(encoded(texts[0].strip()))} {self._seen.wrong}".strip())
        return 0, self._seen.digest

    def add_to(self, columns: MaskColumns, text: str) -> None:
        """Add the mask of the last row, which its table calls so, to the columns of its split."""
        path = encoded(text.strip())
        columns.add(path, os.path.join(self.part.folder, path), self._seen)
