from __future__ import annotations

import sys

import pytest
from images import FORMATS, encode, photo

from effloop.data.decode.auto import AutoConfig, AutoDecoder


@pytest.mark.parametrize(
    ("missing", "jpeg", "other"),
    [
        ([], "TurboJPEGDecoder", "OpenCVDecoder"),
        (["cv2"], "TurboJPEGDecoder", "PillowDecoder"),
        (["simplejpeg"], "OpenCVDecoder", "OpenCVDecoder"),
        (["cv2", "simplejpeg"], "PillowDecoder", "PillowDecoder"),
    ],
)
def test_takes_the_fastest_that_is_installed(
    missing: list[str],
    jpeg: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for package in {"cv2", "simplejpeg"} - set(missing):
        pytest.importorskip(package)
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    decoder = AutoDecoder(AutoConfig())
    assert (type(decoder.jpeg).__name__, type(decoder.other).__name__) == (jpeg, other)
    for fmt in FORMATS:
        assert decoder.decode(encode(photo(), fmt)).shape == (67, 53, 3)
    assert capfd.readouterr() == ("", "")


def test_a_package_that_does_not_import_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str, part: str, install: str) -> None:
        raise ImportError("libGL.so.1: cannot open shared object file")

    monkeypatch.setattr("effloop.data.decode.opencv.optional_package", fail)
    assert type(AutoDecoder(AutoConfig()).other).__name__ == "PillowDecoder"
