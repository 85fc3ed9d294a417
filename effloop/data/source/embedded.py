"""The photographs that are part of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from effloop.data.source.base import sources
from effloop.data.source.config import DataConfig
from effloop.data.source.formats.memmap import MemmapSource
from effloop.data.source.storage.packed import PackedConfig
from effloop.errors import ConfigError

PATH = Path(__file__).parents[1] / "embedded" / "clothing.effloop"


@dataclass
class EmbeddedConfig(DataConfig):
    """Fields of `data=embedded`; `root` stays unset."""

    root: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is not None:
            raise ConfigError(f"data.root: '{self.root}' is not used by data=embedded; drop it, or set data=auto")


@sources.register("embedded", EmbeddedConfig)
class EmbeddedSource(MemmapSource):
    """1,515 + 341 photographs of clothing in 10 classes, inside the package."""

    any_kind = False

    @classmethod
    def claims(cls, root: Path) -> bool:
        return False  # it has no root; MemmapSource claims files of this format

    def __init__(self, config: EmbeddedConfig, split: str) -> None:
        super().__init__(PackedConfig(name="memmap", root=str(PATH)), split)
