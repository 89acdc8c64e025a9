"""Instruments: probes measure a model in training, plots draw what they recorded."""

from normkit.instruments import probes
from normkit.instruments.outputs import read_records
from normkit.instruments.recorder import Recorder, attach

__all__ = ["Recorder", "attach", "probes", "read_records"]
