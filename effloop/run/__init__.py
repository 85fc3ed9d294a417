"""One run, in this process or in ranks; and sweeps, whose jobs are runs."""

from __future__ import annotations

from pathlib import Path

from effloop.data.source.storage.kept import opening_once
from effloop.run.spec import RunSpec


@opening_once()
def run(spec: RunSpec) -> Path:
    """Carry out a run, in this process or in the ranks that it asks for; returns its folder."""
    from effloop.data.source.splits import open_part
    from effloop.parallel.base import detect_launcher

    if not spec.resume:
        for split in ("train", "val"):  # fails at once, before torch is imported and ranks are started
            open_part(spec.config.data, split)
    from effloop.run import training

    if not spec.config.parallel.of_ranks or detect_launcher():
        return training.train(spec)
    if (start := spec.start) and start.is_file() and training.is_done(start, spec.config):
        return spec.folder
    from effloop.run import ranks

    return ranks.launch(spec)
