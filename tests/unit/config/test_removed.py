"""Keys that were removed: refused with what to do instead, and skipped where a saved config has none."""

from __future__ import annotations

import pytest

from effloop import config as configs
from effloop.config.spelling import REMOVED
from effloop.errors import ConfigError


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_and_null_is_skipped(key: str) -> None:
    plain = configs.to_dict(configs.compose([]))
    group, name = key.split(".")
    old = {**plain, group: {**plain[group], name: None}}
    assert configs.to_dict(configs.from_dict(old, [], "old")) == plain
    for compose in (
        lambda: configs.compose([f"{key}=4"]),
        lambda: configs.from_dict({**plain, group: {**plain[group], name: 4}}, [], "old"),
    ):
        with pytest.raises(ConfigError, match=f"'{key}' was removed; "):
            compose()
