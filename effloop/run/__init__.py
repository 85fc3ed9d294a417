"""One run, in this process or in ranks; and sweeps, whose jobs are runs."""

from __future__ import annotations

from pathlib import Path

from effloop.run.spec import RunSpec


def run(spec: RunSpec) -> Path:
    """Carry out a run, in this process or in the ranks that it asks for; returns its folder."""
    from effloop.data.source.splits import open_part
    from effloop.parallel.base import detect_launcher
    from effloop.run import training

    if not spec.config.parallel.of_ranks or detect_launcher():
        return training.train(spec)
    if (start := spec.start) and start.is_file() and training.is_done(start, spec.config):
        return spec.folder
    if not spec.resume:
        for split in ("train", "val"):  # fails in a second, without ranks
            open_part(spec.config.data, split)
    from effloop.run import ranks

    return ranks.launch(spec)
