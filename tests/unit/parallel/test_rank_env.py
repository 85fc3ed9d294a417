"""Where a process stands among others."""

import pytest

from effloop.errors import ConfigError
from effloop.parallel.base import RankEnv, detect_launcher, first_host, tasks_per_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_nothing_found():
    assert detect_launcher({}) is None
    assert (
        detect_launcher({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    )  # a batch script, no srun
    assert detect_launcher({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    shell = {**SLURM, "SLURM_PTY_PORT": "40469", "SLURM_JOB_NAME": "bash"}  # typed in srun -n5 --pty bash
    assert detect_launcher(shell) is None
    assert detect_launcher({**shell, "SLURM_JOB_NAME": "effloop"}) is not None  # srun -n5 --pty effloop


def test_torchrun():
    assert detect_launcher(TORCHRUN) == RankEnv(3, 4, 1, 2, "10.0.0.1", 29500, "torchrun")
    assert detect_launcher({**SLURM, **TORCHRUN}).by == "torchrun"  # srun starts torchrun, torchrun the ranks
    alone = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    assert detect_launcher(alone).local_world_size == 4


def test_slurm():
    assert detect_launcher(SLURM) == RankEnv(3, 5, 1, 2, "gpu03", 15000 + 7070000 % 17768, "slurm")
    env = detect_launcher({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (env.address, env.port) == ("head", 1234)
    assert 15000 <= detect_launcher({**SLURM, "SLURM_JOB_ID": "17767"}).port < 32768
    jobs = [{**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(50) for step in range(50)]
    assert len({detect_launcher(job).port for job in jobs}) == len(jobs)  # all may run on one node


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, ["RANK is 1", "WORLD_SIZE", "torchrun --nproc-per-node", "unset RANK"]),
        ({"WORLD_SIZE": "2"}, ["RANK, MASTER_ADDR, MASTER_PORT", "torchrun --nproc-per-node"]),
        ({**TORCHRUN, "MASTER_ADDR": ""}, ["MASTER_ADDR", "torchrun"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK: '2'", "from 0 to 1"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK: '-1'", "from 0 to 1"]),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, ["LOCAL_RANK: 'x'", "from 0 to 1"]),
        ({key: TORCHRUN[key] for key in TORCHRUN if key != "LOCAL_RANK"}, ["LOCAL_RANK: not set", "from 0 to 1"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK: '4'", "from 0 to 3"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE: '0'"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT: '70000'", "65535"]),
        ({**SLURM, "SLURM_PROCID": "5"}, ["SLURM_PROCID: '5'", "from 0 to 4"]),
        ({**SLURM, "SLURM_LOCALID": "2"}, ["SLURM_LOCALID: '2'", "from 0 to 1"]),
        ({**SLURM, "SLURM_STEP_NODELIST": "[3"}, ["names no machine"]),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "not set", "start with srun"]),
        ({key: SLURM[key] for key in SLURM if key != "SLURM_PROCID"}, ["SLURM_PROCID: not set", "from 0 to 4"]),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "x"}, ["SLURM_STEP_NUM_TASKS: 'x'", "srun"]),
    ],
)
def test_contradictions_are_one_line(env, words):
    with pytest.raises(ConfigError) as caught:
        detect_launcher(env)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,7],x", "gpu03"),
        ("gpu[7,03-05]", "gpu7"),
        ("one", "one"),
        ("one,two", "one"),
        ("a-b.c.d,x", "a-b.c.d"),
        ("rack[1-2]node[3-9]", "rack1node3"),
        ("n[10-12]-ib,m", "n10-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("") == []
