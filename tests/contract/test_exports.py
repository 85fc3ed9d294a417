"""What every format of exported models does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effloop.inference.formats import Format, format_of, formats
from effloop.inference.trained import FixedBatch

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    stem, body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    return nn.Sequential(stem, nn.ReLU(), body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)).eval()


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)


def written(form: Format, path: Path, example: int = 2) -> Path:
    form.save(form.convert(network().requires_grad_(False), images(example)), path, '{"é": 1}')
    return path


@pytest.mark.parametrize("name", formats)
class TestFormat:
    @pytest.mark.slow
    def test_gives_what_the_model_gives(self, name, tmp_path):
        """Batches of any size, in either memory layout; and keeps its metadata."""
        form = formats[name]()
        path = written(form, tmp_path / f"model{form.suffix}")
        assert format_of(path) is formats[name]
        assert {*tmp_path.iterdir()} == {*form.files(path)}
        assert form.read_metadata(path) == '{"é": 1}'
        model = form.open(path, CPU, network).eval()
        with torch.inference_mode():
            for count in (1, 3, 2):
                outputs = model(images(count))
                torch.testing.assert_close(outputs, network()(images(count)), rtol=1e-4, atol=1e-5)
            assert model(images(3)).data_ptr() != outputs.data_ptr(), "a later call writes to the same memory"

    @pytest.mark.slow
    def test_half(self, name, tmp_path):
        """Outputs of float16's precision, but in float32; and nothing of this machine in the file."""
        form = formats[name](half=True)
        path = written(form, tmp_path / f"model{form.suffix}")
        with torch.inference_mode():
            outputs, expected = form.open(path, CPU, network)(images(4)), network()(images(4))
        assert outputs.dtype == torch.float32
        assert 0 < (outputs - expected).abs().max() < 5e-3
        for file in form.files(path):
            assert str(Path(__file__).parent).encode() not in file.read_bytes()
            assert b"site-packages" not in file.read_bytes()


@pytest.mark.parametrize("name", [name for name, kind in formats.items() if kind.fuses and name != "openvino"])
def test_fixed_batch(name, tmp_path):
    """A file for three images takes any number, with `FixedBatch` around it."""
    form = formats[name](dynamic=False)
    model = FixedBatch(form.open(written(form, tmp_path / f"m{form.suffix}", 3), CPU, network), 3)
    with torch.inference_mode():
        for count in (1, 3, 7):
            torch.testing.assert_close(model(images(count)), network()(images(count)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, kind in formats.items() if kind.int8])
@pytest.mark.slow
def test_int8(name, tmp_path):
    """Outputs are near the model's, but not the same; the ranges are those of the calibration."""
    form = formats[name]()
    program: Any = form.convert(copy.deepcopy(network()).requires_grad_(False), images(2))
    ranges = [images(count) for count in (8, 8, 3)]
    results = []
    with torch.inference_mode():
        for scale in (1.0, 0.05):
            path = tmp_path / f"{scale}{form.suffix}"
            form.save(form.quantize(program, [each * scale for each in ranges]), path, "{}")
            results.append((form.open(path, CPU, network)(images(8)) - network()(images(8))).abs().max().item())
    assert 0 < results[0] < 0.02
    assert results[1] > 3 * results[0], "activations beyond the calibrated range are cut"
