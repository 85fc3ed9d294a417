"""What a loader is refused, before anything is loaded."""

import pytest
from runs import TINY

import effloop
from effloop.errors import ConfigError
from effloop.task.classification import Classification


@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_mixing_is_for_classes(photos, monkeypatch, key):
    config = effloop.compose([f"data.root={photos}", *TINY, f"augment.{key}=0.4"])
    effloop.build_loader(config).close()
    monkeypatch.setattr(Classification, "mixes", ())  # as of a task whose targets are numbers
    with pytest.raises(ConfigError, match=rf"augment\.{key}: 0\.4 mixes targets as .* set augment\.{key}=0"):
        effloop.build_loader(config)
