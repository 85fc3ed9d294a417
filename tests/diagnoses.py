"""Diagnoses that never ran."""

from dataclasses import replace

from effloop.measure.diagnose import Diagnosis
from effloop.record.efficiency import Override, Stage, Verdict

GB = 10**9
_RATES = {
    **{"storage": 41000.0, "decode": 1210.0, "augment": 9300.0, "batch": 900000.0, "loader": 1060.0},
    **{"transfer": 52000.0, "step": 1950.0, "log": 90000.0, "loop": 1040.4},
}


def override(text: str, rate: float, why: str, *, exact: bool = True) -> Override:
    return Override(text, why, exact, 1040.0, rate, rate / 1040, [f"effloop data.root=/data/pets {text}"])


DECODE = Diagnosis(  # decoding holds the run back, and the loop waits for it
    version="0.1.0",
    date="2026-11-22 18:40",
    command="effloop diagnose data.root=/data/pets",
    machine={"cores": 2, "device": "NVIDIA H200"},
    data="1,515 images in 10 classes, /data/pets/train",
    run={
        "model": "small_resnet",
        "batch_size": 32,
        "image_size": 64,
        "engine": "threads",
        "num_workers": 2,
        "precision": "fp32",
    },
    images_per_s=1040.4,
    wait=0.41,
    stages=[Stage(name, rate, f"how {name} was measured") for name, rate in _RATES.items()],
    evaluation=0.08,
    verdict=Verdict("decode", "decode-bound: loading yields 1,060 images/s; the step alone could take 1,950"),
    findings=["mine.py:12 reads a tensor in each step, which waits for the device"],
    overrides=[
        override("data.cache=pixels", 1890.0, "decodes once; 93 MB fit in 14 GB"),
        override("num_workers=2", 1240.0, "one thread decodes, another core is free"),
        override("decode.dct_scaling=true", 1102.0, "scales while decoding", exact=False),
    ],
    memory={
        "parts": [
            {"name": "batches of train", "bytes": 393216, "place": "host", "detail": "4 batches of 98 kB"},
            {"name": "activations", "bytes": 71 * GB, "place": "gpu", "detail": "measured"},
        ],
        "total": {"host": 393216, "gpu": 71 * GB},
        "capacity": {"host": 14 * GB, "gpu": 69 * GB},
    },
)

EVALUATION = replace(  # evaluation takes more time than training
    DECODE,
    wait=0.03,
    evaluation=0.52,
    verdict=Verdict("evaluation", "evaluation-bound: 52 % of an epoch's time goes into the validation"),
    overrides=[],
)


def efficiency(found: Diagnosis) -> dict[str, object]:
    """The same as a run's efficiency.json has it."""
    plain = found.to_json()
    share = 1 - found.evaluation
    seconds = {"warm_up": 0.0, "step": share * (1 - found.wait), "wait": share * found.wait}
    told = {key: plain[key] for key in ("images_per_s", "wait", "stages", "verdict")}
    return {
        **told,
        "override": next(iter(plain["overrides"]), None),
        "seconds": {**seconds, "evaluation": found.evaluation},
    }
