"""Plans of runs on cards that aren't here."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from runs import composed

from effloop.config import Config, with_overrides
from effloop.errors import ConfigError
from effloop.measure.measured import loading_here
from effloop.plan import plan as planning
from effloop.plan.cards import Card, cards
from effloop.plan.plan import CardPlan, Data, Loading, Plan, _candidates, _Planner, data_of, plan, precision_on

WORDS = ("model=cnn", "model.width=4", "image_size=32", "batch_size=64", "epochs=4")
A100, T4 = cards["a100"], cards["t4"]
DATA = Data(images=100_000, val_images=10_000, outputs=7)


traces = functools.cache(lambda key: trace(*_asked.pop()))  # of a model, at a size, in a precision
_asked: list[Any] = []
trace = planning.trace


@pytest.fixture(autouse=True)
def _each_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Any, *args: Any) -> Any:
        _asked[:] = [(run, *args)]
        return traces(repr((run.model, run.image_size, run.data.channels, run.task, *args[1:])))

    monkeypatch.setattr(planning, "trace", once)


def planned(*words: str, gpu: Card = A100, load: Any = None) -> Plan:
    return plan(composed(*WORDS, *words), [gpu], DATA, load=load)


def on(*words: str, gpu: Card = A100, gpus: int = 1) -> CardPlan:
    """Without advice, which takes longer."""
    planner = _Planner(DATA)
    planner.gpus = gpus
    return planner.planned(composed(*WORDS, *words), gpu)


@pytest.mark.parametrize(
    ("word", "card", "expected"),
    [("amp=true", A100, "bf16"), ("amp=true", T4, "fp16"), ("precision=fp16", A100, "fp16"), ("amp=false", T4, "fp32")],
)
def test_precision_is_the_cards(word: str, card: Card, expected: str) -> None:
    assert precision_on(composed(word), card) == expected


@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_precision_that_a_card_lacks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' .* T4 .* compute capability 7.5, which has fp32, fp16; set"):
        precision_on(composed(f"precision={name}"), T4)


def test_figures_fit_together_and_one_trace_serves_all_cards() -> None:
    before = traces.cache_info()
    config = composed(*WORDS, "amp=true", "eval_every=3", "optim.ema=0.99")
    found = plan(config, [A100, T4], DATA, gpus=4, prices=[2.0, 0.5])
    after = traces.cache_info()
    assert after.hits + after.misses == before.hits + before.misses + 1
    for card, price in zip(found.cards, (2.0, 0.5), strict=True):
        assert card.peak_bytes == sum(card.memory.values()) < card.capacity
        assert card.fits
        assert card.batch == 64 < card.largest_batch == card.curve[-1][0]
        assert dict(card.curve)[64] == card.images_per_s
        assert card.images_per_s_range[0] < card.images_per_s < card.images_per_s_range[1]
        assert card.hours_range[0] < card.hours < card.hours_range[1]
        trained, evaluated = 4 * DATA.images, 2 * DATA.val_images / 3  # of a step a forward pass is a third
        assert card.hours == pytest.approx((trained + evaluated) / card.images_per_s / 3600)
        assert card.cost == pytest.approx(4 * price * card.hours)
        assert sum(card.step_s.values()) == pytest.approx(4 * 64 / card.images_per_s)
        assert dict(card.curve)[card.saturating_batch] >= 0.95 * card.curve[-1][1]
    assert found.cards[0].images_per_s > found.cards[1].images_per_s
    assert json.loads(json.dumps(found.to_plain()))["cards"][1]["card"] == "t4"


def test_batches_of_an_update_share_it() -> None:
    alone, four = on(), on("accumulate=4")
    assert four.step_s["optimizer"] == pytest.approx(alone.step_s["optimizer"] / 4)
    whole = next(each for each in planned("accumulate=4", gpu=T4).advice if "accumulate" in each.override)
    assert whole.override == "batch_size=256 accumulate=1"
    parts = on("global_batch=512", gpus=2)
    assert (parts.batch, parts.accumulate) == (64, 4)


def test_a_batch_that_does_not_fit_is_planned_as_the_largest_that_does() -> None:
    small = replace(A100, memory=on().peak_bytes - 1)
    found = planned(gpu=small)
    card = found.cards[0]
    assert not card.fits
    assert card.largest_batch < 64
    assert card.images_per_s == dict(card.curve)[card.largest_batch]
    fitting = next(each for each in found.advice if "accumulate" in each.override)
    assert fitting.brings.startswith("the batch fits")
    changed = on(*fitting.override.split(), gpu=small)
    assert changed.fits
    assert changed.batch * changed.accumulate == 64


def test_a_batch_that_just_fits_is_the_largest() -> None:
    card = on("batch_size=61", gpu=replace(A100, memory=on("batch_size=61").peak_bytes))
    assert card.fits
    assert card.largest_batch == 61 <= card.largest_range[1]
    assert card.images_per_s == dict(card.curve)[61]
    assert not on("batch_size=61", gpu=replace(A100, memory=on("batch_size=61").peak_bytes - 1)).fits


def test_a_memory_layout_is_advised_where_it_is_known_to_help() -> None:
    def overrides(*words: str, kinds: dict[str, float]) -> list[str]:
        config, base = composed(*WORDS, "channels_last=false", *words), replace(on(), step_s=kinds)
        return [override for override, _ in _candidates(_Planner(DATA), config, A100, base)]

    assert "channels_last=true" in overrides("amp=true", kinds={"convolutions": 1.0})
    assert "channels_last=true" not in overrides("amp=true", kinds={"grouped convolutions": 1.0})
    assert "channels_last=true" not in overrides("amp=false", kinds={"convolutions": 1.0})


@pytest.mark.slow
def test_what_helps_is_what_a_plan_with_it_says() -> None:
    words = ("batch_size=64", "image_size=64", "model.width=64")
    found = planned(*words, gpu=T4)
    assert {each.override.partition("=")[0] for each in found.advice} == {"amp", "progressive"}
    assert [each.gain for each in found.advice] == sorted((each.gain for each in found.advice), reverse=True)
    for each in found.advice:
        then = on(*words, *each.override.split(), gpu=T4)
        assert then.images_per_s == pytest.approx(each.gain * found.cards[0].images_per_s)
        assert each.gain >= 1.05


def test_a_slow_loader_binds_and_advice_is_measured() -> None:
    def load(config: Config) -> Loading:
        return Loading(*((200.0, 0.01) if config.data.cache.value == "none" else (1000.0, 0.002)), cores=2)

    found = planned(load=load)
    card = found.cards[0]
    assert card.binds == "loader"
    assert card.cores == pytest.approx(0.01 * card.images_per_s)
    assert card.hours == pytest.approx((4 * DATA.images + 4 * DATA.val_images) / 200 / 3600)
    assert not [each for each in found.advice if "of the step" in each.brings]  # which would wait
    gains = {each.override: each.gain for each in found.advice}
    assert gains["data.cache=pixels"] == pytest.approx(5)
    assert gains[f"{math.ceil(card.cores):,} cores"] == pytest.approx(card.images_per_s / 200)
    assert planned(load=lambda config: Loading(1e9, 1e-9, cores=2)).cards[0].binds == "step"


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not even one image fits .*; set precision=amp"):
        planned(gpu=replace(A100, memory=10**8), load=lambda _: pytest.fail("it is refused before loading is measured"))
    with pytest.raises(ConfigError, match="set probe=0"):
        planned("probe=1")
    with pytest.raises(ConfigError, match=r"images: .* classes=N"):
        data_of(composed(), images=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["task=multilabel", "data.channels=1"],
        ["task=regression", "image_size=[32,64]"],
        ["task=segmentation", "model=unet", "progressive=[32,64]"],
    ],
)
def test_tasks(words: list[str]) -> None:
    config = with_overrides(composed(*WORDS[2:]), *words)
    card = plan(config, [T4], data_of(config, images=100, classes=3)).cards[0]
    assert card.largest_batch > 64
    assert card.hours > 0


def test_data_and_loading_are_those_of_a_run() -> None:
    config = composed(*WORDS, "batch_size=100000")  # more than this machine has
    data, loading = data_of(config), loading_here(config, 0.1)
    assert (data.images, data.val_images, data.outputs) == (1515, 341, 10)
    assert loading.images_per_s > 0
    assert loading.core_s > 0
