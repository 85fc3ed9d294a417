"""Files of an export get their names together."""

from __future__ import annotations

from pathlib import Path

import pytest

from effloop.errors import ConfigError
from effloop.inference.export import ExportOptions, _in_place
from effloop.inference.formats.openvino import OpenVino


@pytest.mark.parametrize("suffix", [".xml", ".bin"])
def test_out_is_no_folder(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"ov{suffix}").mkdir()
    with pytest.raises(ConfigError, match=rf"out: .*ov\{suffix} is a folder; set out=FILE.xml"):
        ExportOptions("openvino", out=tmp_path / "ov.xml")


@pytest.mark.parametrize("before", [True, False])
def test_both_files_or_none(before: bool, tmp_path: Path) -> None:
    """The name of the second is taken meanwhile."""
    path = tmp_path / "ov.xml"
    if before:
        path.with_suffix(".bin").write_text("old")

    def export(name: Path) -> None:
        with _in_place(OpenVino(), name) as temporary:
            for file in OpenVino.files(temporary):
                file.write_text("new")
            if name.name == "ov.xml":
                name.mkdir()

    with pytest.raises(ConfigError, match="can't be written"):
        export(path)
    left = {each.name: each.read_text() for each in tmp_path.iterdir() if each.is_file()}
    assert left == ({"ov.bin": "old"} if before else {})
    export(tmp_path / "other.xml")
    assert {each.name for each in tmp_path.glob("other.*")} == {"other.xml", "other.bin"}
