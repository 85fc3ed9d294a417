"""Split weights, gradients and optimizer state are what one process has; on any number of ranks."""

import json
import pickle
import zlib
from io import BytesIO
from pathlib import Path, PosixPath

import pytest
from ranks import run_script

from effloop.config import compose
from effloop.errors import CheckpointError, ConfigError
from effloop.parallel import sharded
from effloop.parallel.sharded import with_shards

NET = """
    import torch
    from torch import nn

    def net(*between):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 7, 3), nn.GroupNorm(1, 7), *between, nn.Flatten(), nn.Linear(7 * 36, 5), nn.Linear(5, 3)]
        return nn.Sequential(nn.Sequential(*layers[:2]), *layers[2:]).to(memory_format=torch.channels_last)

    def blocks(model):
        return [each for each in model if [*each.parameters()]][:2]

    torch.manual_seed(1)
    BATCHES = [(torch.randn(8, 3, 8, 8), torch.randint(3, (8,))) for _ in range(6)]
"""
SCRIPT = f"""
    {NET}
    import copy, json
    from pathlib import Path
    from effloop.errors import ConfigError
    from effloop.optim import EMA, clipping
    from effloop.parallel import parallels
    from effloop.parallel.fsdp import FsdpConfig
    from effloop.parallel.sharded import with_shards
    from effloop.train.nan import all_finite

    parallel = parallels.build(FsdpConfig(name="fsdp"), torch.device("cpu"))
    rank, out = parallel.rank, {{}}

    def built(split, dtype=None):
        model = net()
        copied = copy.deepcopy(model)
        for each in (model, copied) if split else ():
            parallel.shard(each, blocks, dtype)
        return model, EMA(model, 0.9, copied=copied), torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model, average, optimizer, batches, part=slice(None)):
        clip = clipping(model, 0.5, None, None)
        for images, targets in batches:
            nn.functional.cross_entropy(model(images[part]), targets[part]).backward()
            clip(optimizer)
            optimizer.step()
            average.update()
            optimizer.zero_grad()
        weights = {{"model": average.model.state_dict(), "trained": model.state_dict()}}
        return {{**weights, "optimizer": optimizer.state_dict()}}

    mine = slice(rank, None, 2)
    alone, (model, average, optimizer) = built(False), built(True)
    wanted = train(*alone, BATCHES)
    state = parallel.whole(train(model, average, optimizer, BATCHES[:4], mine), Path("checkpoints"))
    parts = [sum(each.numel() for each in parallel.local(model.parameters())), *map(torch.numel, net().parameters())]
    out["parts"] = [parts[0], sum(parts[1:])]
    torch.save(state, "state.pt") if not rank else None
    parallel.gather(0)

    state = torch.load("state.pt", weights_only=True)  # a new run continues
    model, average, optimizer = built(True)
    model.load_state_dict(parallel.own(state["trained"], model.state_dict()))
    average.load_state_dict({{"updates": 4}}, parallel.own(state["model"], average.model.state_dict()))
    parameters, entries = [*model.parameters()], state["optimizer"]["state"]
    shards = {{**state["shards"], "folder": "checkpoints/" + state["shards"]["folder"]}}
    optimizer.load_state_dict({{**state["optimizer"], "state": with_shards(entries, shards, parameters)}})
    whole = with_shards(entries, shards, [*net().parameters()])  # as one process reads it, and ranks split
    again = parallel.own(whole, dict(enumerate(parameters)))
    kept = optimizer.state_dict()["state"]
    same = [torch.equal(again[n][k].to_local(), kept[n][k].to_local()) for n in kept for k in ("exp_avg", "exp_avg_sq")]
    out["whole"] = [len(same), all(same)]
    found = parallel.whole(train(model, average, optimizer, BATCHES[4:], mine), Path("checkpoints"))
    if not rank:
        pairs = [(found[key][n], v) for key in ("model", "trained") for n, v in wanted[key].items()]
        out["far"] = max(float((one - other).abs().max()) for one, other in pairs)

    model, average, optimizer = built(True, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(BATCHES[0][0])
    outputs.float().sum().backward()
    out["bf16"] = [str(outputs.dtype), *{{str(each.grad.dtype) for each in model.parameters()}}]
    parallel.local([model[-1].weight.grad])[0].fill_(float("nan") if rank else 0)  # where one rank sees it
    gradients = parallel.local(each.grad for each in model.parameters())
    out["finite"] = [bool(all_finite(gradients)), bool(parallel.all_ranks(all_finite(gradients)))]
    norms = net(nn.BatchNorm2d(7))
    parallel.shard(norms, blocks, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out["norms"] = str(norms(BATCHES[0][0]).dtype)
    try:
        parallel.shard(net(), blocks, torch.float16)
    except ConfigError as error:
        out["float16"] = str(error)
    parallel.close()
    print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], Path]:
    folder = tmp_path_factory.mktemp("fsdp")
    ended = run_script(SCRIPT, folder)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(out) for _, out, _ in ended], folder


def test_ranks_compute_what_one_process_does_across_a_checkpoint(ran):
    first, second = ran[0]
    assert first["far"] < 1e-6
    for out in (first, second):
        own, all_of_them = out["parts"]
        assert 0.4 < own / all_of_them < 0.6
        assert out["whole"] == [16, True]
        assert out["bf16"] == ["torch.bfloat16", "torch.float32"]
        assert out["norms"] == "torch.bfloat16"
        assert out["float16"] == "precision: float16 can't be used with parallel=fsdp; set precision=bf16 or fp32"
    assert [first["finite"], second["finite"]] == [[True, False], [False, False]]


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_an_index_runs_no_code_and_damage_is_found(ran, capsys):
    folder = next((ran[1] / "checkpoints").glob("shards-*"))
    index, rank1 = folder / ".metadata", folder / "__1_0.distcp"
    shards = {"folder": folder, "crc32": zlib.crc32(whole := index.read_bytes())}
    state = {number: {} for number in range(8)}
    net = {}
    exec("\n".join(line[4:] for line in NET.splitlines()), net)
    parameters = [*net["net"]().parameters()]

    def said(**changed: object) -> str:
        with pytest.raises(CheckpointError) as caught:
            with_shards(state, {**shards, **changed}, parameters)
        return str(caught.value)

    assert len(with_shards(state, shards, parameters)[7]) == 2
    assert "its index is damaged" in said(crc32=1)
    assert "No such file" in said(folder=folder.with_name("shards-1"))
    index.write_bytes(code := pickle.dumps(Code()))
    assert "its index holds builtins.print" in said(crc32=zlib.crc32(code))
    index.write_bytes(code := b"ctorch.distributed.checkpoint.metadata\n__builtins__\n.")
    assert "its index holds torch.distributed.checkpoint.metadata.__builtins__" in said(crc32=zlib.crc32(code))
    assert sharded._Index(BytesIO(b"cpathlib._local\nPosixPath\n.")).load() is PosixPath  # as Python 3.13 writes it
    index.write_bytes(whole)
    data = bytearray(rank1.read_bytes())
    data[data.index(b"/data/0") + 100] ^= 1
    rank1.write_bytes(data)
    assert "is damaged" in said()
    assert capsys.readouterr().out == ""


OPTIMIZERS = f"""
    {NET}
    import json
    from effloop.optim import optimizers
    from effloop.optim.library import lazy_names
    from effloop.parallel import parallels
    from effloop.parallel.fsdp import _WHOLE, FsdpConfig

    parallel = parallels.build(FsdpConfig(name="fsdp"), torch.device("cpu"))
    far = {{}}
    for name, config in lazy_names().items():
        if _WHOLE.search(config.arch):
            continue
        alone, split = net(), net()
        parallel.shard(split, blocks, None)
        config.lr = 0.01
        for model in (alone, split):
            optimizer = optimizers.build(config, model.parameters())
            for images, targets in BATCHES:
                nn.functional.cross_entropy(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(alone.parameters(), split.parameters())
        far[name] = max(float((one - other.full_tensor()).abs().max()) for one, other in pairs)
    parallel.close()
    print(json.dumps(far))
"""


@pytest.mark.nightly
def test_optimizers_that_are_not_refused_are_the_same_on_split_weights(tmp_path):
    pytest.importorskip("timm")
    (code, out, err), _ = run_script(OPTIMIZERS, tmp_path)
    assert code == 0, err
    far = json.loads(out)
    assert len(far) > 50
    assert {name: each for name, each in far.items() if not each < 1e-5} == {}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["compile=true"], "compile: true needs whole weights, parallel=fsdp splits them; set compile=false, or"),
        (["max_grad_ratio=0.1"], "max_grad_ratio: 0.1 needs whole weights, .*; set max_grad_norm instead"),
        (["optim=muon"], "optim: muon needs whole weights, .*; set optim=adamw, or another that updates each"),
    ],
)
def test_what_needs_whole_weights_is_refused(words, line):
    with pytest.raises(ConfigError, match=line):
        compose(["parallel=fsdp", *words])
