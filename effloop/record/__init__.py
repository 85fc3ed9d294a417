"""What a run leaves behind, and what it shows while it goes on."""

from effloop.record import run
from effloop.record.base import Position, RecordConfig, Recorder, recorders
from effloop.record.metrics import Metrics

__all__ = ["Metrics", "Position", "RecordConfig", "Recorder", "recorders", "run"]
