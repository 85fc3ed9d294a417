"""What ranks do together, by two real processes."""

import json

import pytest
import torch
import torch.distributed as dist
from ranks import run_script

from effloop.errors import ConfigError
from effloop.parallel import ParallelConfig, ddp, parallels
from effloop.parallel.base import RankEnv
from effloop.parallel.ddp import DdpConfig

SCRIPT = """
    import json, torch
    from torch import nn
    from effloop.errors import ConfigError, DataError
    from effloop.parallel import parallels
    from effloop.parallel.batchnorm import SyncBatchNorm
    from effloop.parallel.ddp import DdpConfig

    out = {}
    parallel = parallels.build(DdpConfig(name="ddp", sync_batchnorm=True), torch.device("cpu"))
    rank = parallel.rank
    values = torch.arange(3.0) + rank
    out["sum"] = [parallel.sum(values).tolist(), values.tolist()]
    gathered = parallel.gather({"a": (rank, "x" * rank), "t": torch.arange(rank + 1)})
    out["gather"] = [[value["a"], value["t"].tolist()] for value in gathered]
    out["first"] = parallel.on_rank0(lambda: {"rank": rank})

    def fail():
        raise DataError(f"from rank {rank}")

    calls = {"error": lambda: parallel.on_rank0(fail), "same": lambda: parallel.assert_equal("x", str(rank))}
    for name, call in calls.items():
        try:
            call()
        except (ConfigError, DataError) as error:
            out[name] = [type(error).__name__, str(error)]
    parallel.assert_equal("y", "alike")

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
            self.model(torch.zeros(2, 3, 6, 6))

        def forward(self, images, targets, valid):
            loss = nn.functional.cross_entropy(self.model(images), targets)
            return loss, torch.ones(7, dtype=torch.float64)

    def train(step, stepper, parts):
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
        losses = []
        for part in parts:
            loss, _ = stepper(*part, None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [p.flatten()[:5].tolist() for p in step.state_dict().values()]

    torch.manual_seed(1)
    whole = [(torch.randn(8, 3, 6, 6) * 3 + 5, torch.randint(2, (8,))) for _ in range(4)]
    mine = [(images[rank::2], targets[rank::2]) for images, targets in whole]
    alone, together = Step(), Step()
    stepper = parallel.wrap_step(parallel.wrap(together), find_unused=False)
    out["kinds"] = [type(m).__name__ for m in together.model]
    out["names"] = list(alone.state_dict()) == list(together.state_dict())
    out["alone"] = train(alone, alone, whole)
    losses, state = train(together, stepper, mine)
    out["together"] = ([(a + b) / 2 for a, b in zip(*parallel.gather(losses))], state)

    step = Step()
    stepper = parallel.wrap_step(parallel.wrap(step), find_unused=False)
    with parallel.gradients(stepper, sync=False):
        stepper(*mine[0], None)[0].backward()
    ours = parallel.gather([p.grad.norm().item() for p in step.parameters()])
    out["apart"] = ours[0] != ours[1]
    with parallel.gradients(stepper, sync=True):
        stepper(*mine[1], None)[0].backward()
    ours = parallel.gather([p.grad.norm().item() for p in step.parameters()])
    out["joined"] = ours[0] == ours[1]

    norm = nn.BatchNorm2d(2)
    norm.running_mean.fill_(rank)
    norm.running_var.fill_(0.1)
    parallel.average_buffers(norm)
    out["buffers"] = [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]
    wishes = [[0, 0], [1, 0], [0, 6], [0, 0], [8, 8]]
    out["agreed"] = [parallel.agree(each[rank]) for each in wishes]
    parallel.close()
    parallel.close()
    print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    ended = run_script(SCRIPT, tmp_path_factory.mktemp("ddp"))
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(out) for _, out, _ in ended]


def test_sums_and_values_reach_every_rank(said):
    for rank, out in enumerate(said):
        assert out["sum"] == [[1, 3, 5], [rank, 1 + rank, 2 + rank]]
        assert out["gather"] == [[[0, ""], [0]], [[1, "x"], [0, 1]]]
        assert out["first"] == {"rank": 0}


def test_errors_are_every_ranks(said):
    for out in said:
        assert out["error"] == ["DataError", "from rank 0"]
        kind, line = out["same"]
        assert kind == "ConfigError"
        assert line.startswith("x: ")
        assert "'0' (rank 0 on" in line
        assert "'1' (rank 1 on" in line


def test_synchronised_batchnorm_equals_one_process_with_the_whole_batch(said):
    for out in said:
        assert out["kinds"][1] == "SyncBatchNorm"
        assert out["names"]
        (losses, state), (losses_alone, state_alone) = out["together"], out["alone"]
        assert losses == pytest.approx(losses_alone, rel=1e-5)
        for one, other in zip(state, state_alone, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert said[0]["together"] == said[1]["together"]


def test_gradients_meet_only_when_they_are_to(said):
    assert all(out["apart"] and out["joined"] for out in said)


def test_wishes_are_every_ranks_one_call_later(said):
    for out in said:
        assert out["agreed"] == [0, 0, 1, 6, 0]
    assert parallels.build(ParallelConfig(name="none"), torch.device("cpu")).agree(5) == 5


def test_buffers_are_averaged(said):
    for out in said:
        assert out["buffers"] == [[0.5, 0.5], pytest.approx([0.1, 0.1]), 0]


def test_alone_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node N SCRIPT"):
        parallels.build(DdpConfig(name="ddp"), torch.device("cpu"))


@pytest.mark.parametrize(
    "field", [{"processes": 0}, {"max_restarts": -1}, {"timeout_s": 0.5}, {"timeout_s": float("inf")}]
)
def test_fields_are_checked(field):
    with pytest.raises(ConfigError, match=f"parallel.{next(iter(field))}: .* is not allowed; set"):
        DdpConfig(name="ddp", **field)


def test_ranks_that_differ_end_with_one_line_each(tmp_path):
    script = """
        import os, torch
        from effloop.errors import ConfigError
        from effloop.parallel.base import detect_launcher
        from effloop.parallel.rendezvous import join
        try:
            join(detect_launcher(), {"the arguments": "seed=" + os.environ["RANK"]})
        except ConfigError as error:
            print(error)
    """
    lines = [out.strip() for _, out, _ in run_script(script, tmp_path)]
    assert lines[0] == lines[1]
    assert lines[0].startswith("the arguments: not the same on all ranks: 'seed=0' (rank 0 on ")
    assert "'seed=1' (rank 1 on " in lines[0]


def test_a_taken_port_is_named(tmp_path):
    script = """
        import socket
        from dataclasses import replace
        from effloop.errors import ConfigError
        from effloop.parallel.base import detect_launcher
        from effloop.parallel.rendezvous import join
        with socket.create_server(("", 0)) as server:
            try:
                join(replace(detect_launcher(), port=server.getsockname()[1]))
            except ConfigError as error:
                print(f"ss -ltnp 'sport = {server.getsockname()[1]}'" in str(error), error)
    """
    ((code, out, err),) = run_script(script, tmp_path, world_size=1)
    assert out.startswith("True MASTER_PORT: "), (code, out, err)


def test_nccl_is_told_its_gpu(monkeypatch):
    """With torch's own stand-in for NCCL; the other half of the group, gloo, works as before."""
    import torch.testing._internal.distributed.fake_pg  # registers `fake`

    device, begin = torch.device("cuda", 1), ddp.dist.init_process_group
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(ddp.gpu, "use", lambda device: device)
    monkeypatch.setattr(
        ddp.dist,
        "init_process_group",
        lambda backends, **options: begin(backends.replace("cuda:nccl", "cuda:fake"), **options),
    )
    ddp._open_group(RankEnv(0, 1, 1, 2, "localhost", 1, "torchrun"), dist.HashStore(), device, 60.0)
    try:
        values = torch.ones(2)
        dist.all_reduce(values)
        assert (dist.group.WORLD.bound_device_id, values.tolist()) == (device, [1, 1])
    finally:
        dist.destroy_process_group()
