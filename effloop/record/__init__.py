"""Recorders: the files, progress and tracker entries of a run."""

from effloop.record.base import Metrics, Position, RecordConfig, Recorder, recorders
from effloop.record.rows import SKIPPED, complete_summary

__all__ = ["SKIPPED", "Metrics", "Position", "RecordConfig", "Recorder", "complete_summary", "recorders"]
