from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from effloop.errors import ConfigError
from effloop.run.sweep import compose_shared


@pytest.mark.parametrize(
    "words",
    [
        "model=resnet18,resnet50 model.pretrained=true",
        "data=folder data.root=/a,/b seed=range(1,4)",
        "seed=1,2 lr=nan,1",
    ],
)
def test_keys_may_need_a_value_that_is_swept(words: str) -> None:
    hydra, config = compose_shared(["-m"], OverridesParser.create().parse_overrides(words.split()))
    assert hydra.runtime.choices["hydra/sweeper"] == "basic"
    assert config.objective == "val/top1"


def test_what_no_job_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a key of the model chosen"):
        compose_shared(["-m"], OverridesParser.create().parse_overrides(["seed=1,2", "model.pretrained=true"]))
