"""Results of diagnoses that never ran."""

from __future__ import annotations

from typing import Any

GB = 10**9


def stages(**rates: float) -> list[dict[str, Any]]:
    return [{"name": name, "images_per_s": rate, "detail": f"how {name} was measured"} for name, rate in rates.items()]


def override(text: str, rate: float, why: str, *, exact: bool = True, measured: float | None = None) -> dict[str, Any]:
    told = {"override": text, "images_per_s": rate, "gain": rate / 1040, "why": why, "exact": exact}
    return {**told, "measured": measured, "learned": None, "commands": [f"effloop data.root=/data/pets {text}"]}


DECODE: dict[str, Any] = {
    "what": "diagnosis",
    "version": "0.1.0",
    "date": "2026-11-22 18:40",
    "command": "effloop diagnose data.root=/data/pets verify=true",
    "machine": {"cores": 2, "device": "NVIDIA H200"},
    "data": "1,515 images in 10 classes, /data/pets/train",
    "run": {
        "model": "small_resnet",
        "batch_size": 32,
        "image_size": 64,
        "engine": "threads",
        "num_workers": 2,
        "precision": "fp32",
    },
    "images_per_s": 1040.4,
    "wait": 0.41,
    "stages": stages(
        storage=41000.0,
        decode=1210.0,
        augment=9300.0,
        batch=900000.0,
        loader=1060.0,
        transfer=52000.0,
        step=1950.0,
        log=90000.0,
        loop=1040.4,
    ),
    "evaluation": 0.08,
    "verdict": {
        "bound": "decode",
        "line": "decode-bound: decoding yields 1,210 images/s where the step could take 1,950; 41 % of the time waits",
    },
    "findings": ["mine.py:12 reads a tensor in each step, which waits for the device"],
    "overrides": [
        {
            **override("data.cache=pixels", 1890.0, "decodes once; 93 MB fit in 14 GB", measured=1811.0),
            "learned": "as measured here on 2026-11-20",
        },
        override("num_workers=2", 1240.0, "one thread decodes, another core is free", measured=1198.0),
        override("decode=turbojpeg", 1102.0, "scales while decoding", exact=False),
    ],
    "memory": {
        "parts": [
            {"name": "batches of train", "bytes": 393216, "place": "host", "detail": "4 batches of 98 kB"},
            {"name": "activations", "bytes": 71 * GB, "place": "gpu", "detail": "measured"},
        ],
        "total": {"host": 393216, "gpu": 71 * GB},
        "capacity": {"host": 14 * GB, "gpu": 69 * GB},
    },
}
"""Decoding holds the run back, and the loop waits for it."""

EVALUATION: dict[str, Any] = {
    **DECODE,
    "wait": 0.03,
    "evaluation": 0.52,
    "verdict": {"bound": "evaluation", "line": "evaluation-bound: 52 % of an epoch's time goes into the validation"},
    "overrides": [],
}
"""Evaluation takes more time than training."""
