import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import effloop
from effloop.assemble.environment import Resolved, resolved
from effloop.assemble.model import build_model, random_batch
from effloop.errors import ConfigError
from effloop.plan.trace import _GPU, Trace, _attention, _fake_gpu, _Watch, trace
from effloop.precision import tf32_switches
from effloop.task import Task, tasks

OUTPUTS = 4


def configured(*words: str) -> tuple[Resolved, Task]:
    config = resolved(effloop.compose(["image_size=32", "batch_size=2", *words]))
    return config, tasks.build(config.task).for_outputs(OUTPUTS)


def traced(*words: str, dtype: torch.dtype | None = None) -> Trace:
    return trace(*configured(*words), OUTPUTS, dtype)


def flops(found: Trace) -> float:
    return sum(each.flops for each in found.ops)


@pytest.mark.parametrize(
    "words",
    [
        ["model=cnn", "task=regression", "data.channels=1", "image_size=[32,48]"],
        ["model=small_resnet", "task=multilabel"],
        ["model=unet", "task=segmentation"],
        ["model=timm", "model.arch=deit_tiny_patch16_224"],
    ],
    ids=lambda words: words[0],
)
def test_floating_point_operations_are_those_of_a_real_step(words: list[str]) -> None:
    config, task = configured(*words)
    model = build_model(config, OUTPUTS, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # torch doesn't count the CPU's other
        images, targets, _ = random_batch(config, config.size, task, OUTPUTS, torch.device("cpu"))
        task.loss(model.train()(images), targets)
    found = trace(config, task, OUTPUTS, torch.bfloat16)
    assert flops(found) == counter.get_total_flops() / config.batch_size
    assert found.weights == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def test_the_process_is_as_before() -> None:
    def state() -> list[object]:
        return [tf32_switches(), torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()]

    torch.backends.cudnn.allow_tf32 = False
    before = state()
    traced("model=cnn", dtype=torch.float16)
    assert state() == before


def test_blocks_that_are_recomputed_keep_their_inputs() -> None:
    plain, saving = traced("model=resnet18"), traced("model=resnet18", "model.checkpointing=true")
    assert flops(saving) == flops(plain)
    again = sum(each.flops for each in saving.ops if each.forward == 2)
    assert 0.8 < again / flops(plain) < 1  # all but the first layer and the last
    assert 0 < saving.block < saving.saved < plain.saved
    assert plain.block == 0


def test_what_is_frozen_has_no_backward_pass() -> None:
    found = traced("model=resnet18", "model.freeze=[conv1,bn1,layer1,layer2,layer3]")
    products = [each.backward for each in found.ops if each.flops]
    # Of the first trained block, two convolutions take what needs no gradient.
    assert products == [0.0] * 15 + [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]
    found = traced("model=resnet18", "model.freeze=[conv1,bn1,layer1,layer2,layer3,layer4]")
    assert [each.backward for each in found.ops if each.flops] == [0.0] * 20 + [0.5]  # a bias is no factor


def test_images_that_no_memory_has_room_for() -> None:
    found = traced("model=cnn", "image_size=20000")
    assert found.saved > 20000**2 * 4


def test_a_model_that_reads_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.ReLU.forward", lambda _, images: images * images.sum().item())
    with pytest.raises(ConfigError, match="model: cnn can't be planned, as it reads values"):
        traced("model=cnn")


def test_attention_of_more_dimensions_is_in_parts_as_on_a_gpu() -> None:
    with _fake_gpu():
        query = torch.empty(2, 3, 4, 5, 6, requires_grad=True, device=_GPU)
        with _Watch() as watch:
            assert _attention(query, query, query).shape == query.shape
    names = [each.name for each in watch.ops]
    assert "bmm" in names
    assert "_scaled_dot_product_efficient_attention" not in names


@pytest.mark.nightly
def test_attention_in_torch_s_own_layer_is_one_operation() -> None:
    names = [each.name for each in traced("model=vit_b_16", "image_size=32").ops]
    assert names.count("_scaled_dot_product_efficient_attention") == 12
    assert "bmm" not in names


def test_a_build_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """There fake tensors are on the CPU, whose autocast keeps other operations in float32."""
    words = "model=unet", "task=segmentation"
    found = traced(*words, dtype=torch.float16)
    monkeypatch.setattr("effloop.plan.trace._GPU", torch.device("cpu"))
    other = traced(*words, dtype=torch.float16)
    assert flops(other) == flops(found)
    assert other.saved == pytest.approx(found.saved, rel=0.01)
    moved, others = (sum(each.bytes for each in one.ops) for one in (found, other))
    assert others == pytest.approx(moved, rel=0.1)
