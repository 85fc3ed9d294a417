"""What it took to have a remote dataset on this machine."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fetched:
    """What it took to have a remote dataset here.

    Attributes:
        files, bytes: of the dataset.
        fetched_bytes: those that weren't here yet.
        seconds: for listing and fetching.
    """

    files: int
    bytes: int
    fetched_bytes: int
    seconds: float

    def __add__(self, other: Fetched) -> Fetched:
        """Both together."""
        return Fetched(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float:
        """Share of the bytes that were here."""
        return max(0.0, 1 - self.fetched_bytes / self.bytes) if self.bytes else 1.0

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes fetched in a second."""
        return self.fetched_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def facts(self) -> dict[str, float]:
        """For a run's summary."""
        return {**asdict(self), "hit_rate": self.hit_rate, "mb_per_s": self.mb_per_s}

    def line(self, root: str, folder: Path) -> str:
        """For a run's log."""
        came = f"{self.fetched_bytes / 1e6:,.1f} MB fetched in {self.seconds:.1f} s, {self.mb_per_s:,.1f} MB/s; "
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return (
            f"remote {root}: {files}, {self.bytes / 1e6:,.1f} MB; {came * (self.fetched_bytes > 0)}"
            f"{self.hit_rate:.1%} of the bytes were already in {folder}"
        )
