"""What a run leaves behind, and what it shows while it goes on."""

from effloop.record import run
from effloop.record.base import Moment, RecordConfig, Recorder, recorders
from effloop.record.metrics import Metrics, Totals, counted

__all__ = ["Metrics", "Moment", "RecordConfig", "Recorder", "Totals", "counted", "recorders", "run"]
