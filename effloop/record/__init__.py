"""Recorders: the files, progress and tracker entries of a run."""

from effloop.record import run
from effloop.record.base import Position, RecordConfig, Recorder, recorders
from effloop.record.metrics import Metrics

__all__ = ["Metrics", "Position", "RecordConfig", "Recorder", "recorders", "run"]
