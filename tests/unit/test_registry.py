"""The one door for every part."""

import os
import sys
from collections.abc import Iterator

import pytest

from effloop.config import Config
from effloop.errors import ConfigError, optional_package
from effloop.registry import PartConfig, Registry, groups, plugin_files, use_plugin_files


@pytest.fixture
def registry() -> Iterator[Registry[str]]:
    yield Registry("test_group")
    del groups["test_group"]


def test_builds_what_is_named(registry):
    @registry.register("shout", PartConfig)
    def shout(config: PartConfig, word: str) -> str:
        """Says it loudly.

        More about it.
        """
        return word.upper()

    assert registry.build(PartConfig(name="shout"), "hey") == "HEY"
    assert registry.names() == ["shout"]
    assert registry["shout"].summary == "Says it loudly."


def test_what_takes_no_channels_takes_three(registry):
    registry.register("colour", PartConfig)(lambda config, word: f"{word} in colour")
    registry.register("any", PartConfig)(lambda config, word, channels=3: f"{word} in {channels}")
    assert registry.build_for(3, PartConfig(name="colour"), "hey") == "hey in colour"
    assert [registry.build_for(count, PartConfig(name="any"), "hey") for count in (1, 3)] == ["hey in 1", "hey in 3"]
    with pytest.raises(ConfigError, match=r"^data\.channels: 1, but test_group=colour takes 3 only; choose another"):
        registry.build_for(1, PartConfig(name="colour"), "hey")


def test_a_name_is_taken_once(registry):
    registry.register("a", PartConfig)(str)
    with pytest.raises(ValueError, match="test_group 'a' is registered already"):
        registry.register("a", PartConfig)(repr)
    with pytest.raises(ValueError, match="exists already"):
        Registry("test_group")


def test_a_part_is_imported_when_it_is_chosen(tmp_path, monkeypatch):
    (tmp_path / "made_late.py").write_text(
        "from effloop.registry import PartConfig, groups\n"
        "@groups['test_late'].register('late', PartConfig)\n"
        "def late(config): return 'built'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[str] = Registry("test_late", {"late": "made_late"})
    try:
        assert registry.names() == ["late"]
        assert "late" in registry
        assert "made_late" not in sys.modules
        assert registry.build(PartConfig(name="late")) == "built"
        with pytest.raises(ValueError, match="test_late 'late' is registered already"):
            registry.register("late", PartConfig)(str)
    finally:
        del groups["test_late"]


@pytest.mark.parametrize("group", Config.GROUPS)
def test_modules_register_what_the_registry_says(group):
    for name in groups[group]:
        assert groups[group][name].config(name=name).name == name


def test_unknown_name(registry):
    registry.register("pillow", PartConfig)(str)
    with pytest.raises(ConfigError, match=r"test_group: no choice 'pilow'; have pillow; did you mean 'pillow'\?"):
        registry.build(PartConfig(name="pilow"))


def test_missing_package_says_what_to_install():
    with pytest.raises(ConfigError, match=r"model=x needs the package 'not_here_at_all'; pip install 'effloop\[x\]'"):
        optional_package("not_here_at_all", "model=x", "effloop[x]")


def test_plugin_files_by_any_path(tmp_path, monkeypatch):
    """Their folder is on the path already, by another spelling of it."""
    file, linked = tmp_path / "found_by_any_path.py", tmp_path / "linked"
    file.touch()
    linked.symlink_to(tmp_path)
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in (file, linked / file.name, tmp_path / "in" / ".." / file.name):
        use_plugin_files([str(name)])
        assert plugin_files()[0].samefile(file)
    for name in ("os.py", "sys.py", "effloop.py"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match="which is another module; rename it"):
            use_plugin_files([str(tmp_path / name)])
