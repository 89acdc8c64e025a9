"""Changing a model's normalization: verbs that say what they did, prove it, and can be undone."""

from normkit.surgery.adapt import adapt
from normkit.surgery.convert import convert
from normkit.surgery.export import ExportCheck, check_export
from normkit.surgery.fold import fold
from normkit.surgery.freeze import freeze, unfreeze
from normkit.surgery.manifest import manifest
from normkit.surgery.recalibrate import recalibrate
from normkit.surgery.result import Change, Parity, Surgery
from normkit.surgery.saving import load, save
from normkit.surgery.storing.checkpoint import CheckpointError
from normkit.surgery.storing.mismatch import MismatchError
from normkit.surgery.updates import no_updates

__all__ = [
    "Change",
    "CheckpointError",
    "ExportCheck",
    "MismatchError",
    "Parity",
    "Surgery",
    "adapt",
    "check_export",
    "convert",
    "fold",
    "freeze",
    "load",
    "manifest",
    "no_updates",
    "recalibrate",
    "save",
    "unfreeze",
]
