"""The table of cards, and what people and torch call them."""

from __future__ import annotations

import pytest

from effloop.errors import ConfigError
from effloop.plan.cards import cards, find, of_device

SPELLINGS = {
    "H100": "h100",
    "h100 sxm": "h100",
    "h100-80gb": "h100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "A100": "a100",
    "a100 80 GB": "a100",
    "A100-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "tesla t4": "t4",
    "3090": "rtx3090",
    "RTX 3090": "rtx3090",
    "rtx_3090": "rtx3090",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "2080ti": "rtx2080ti",
    "a6000": "rtxa6000",
    "RTX 6000 Ada": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
    "A10": "a10",
    "NVIDIA A10G": "a10g",
    "l4": "l4",
    "L40S": "l40s",
}


def test_figures_are_of_an_order_that_cards_have() -> None:
    for name, card in cards.items():
        assert of_device(name) is of_device(card.title) is card, name
        assert 8 * 2**30 <= card.memory <= 300 * 2**30, name
        assert 0.2e12 < card.bandwidth < 10e12, name
        assert 1.9 < card.fp16 / card.fp32 <= 30, name
        if card.capability < (8, 0):
            assert card.bf16 == card.tf32 == 0, name
        else:
            assert card.bf16 == card.fp16 >= 1.9 * card.tf32 >= card.fp32, name
        assert 15e9 < card.link < 1e12, name
        assert 2017 <= card.year <= 2026, name
        assert card.source.startswith("https://"), name


@pytest.mark.parametrize(("name", "expected"), SPELLINGS.items())
def test_a_card_by_what_it_is_called(name: str, expected: str) -> None:
    assert find(name).name == expected


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 3080 Ti", "RTX 6000", "NVIDIA", "", "h10"])
def test_another_card_isnt_taken_for_one_that_is_similar(name: str) -> None:
    assert of_device(name) is None
    with pytest.raises(ConfigError, match=r"^gpu: '.*' is not in the table of .*; the nearest names: \w+"):
        find(name)
