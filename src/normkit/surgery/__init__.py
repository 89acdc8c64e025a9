"""Changing a model's normalization: verbs that say what they did, prove it, and can be undone."""

from normkit.surgery.check_export import ExportCheck, check_export
from normkit.surgery.checkpoint import load, save
from normkit.surgery.checkpoint.differences import MismatchError
from normkit.surgery.checkpoint.file import CheckpointError
from normkit.surgery.checkpoint.manifest import manifest
from normkit.surgery.fold import fold
from normkit.surgery.masked import masked
from normkit.surgery.merge import merge
from normkit.surgery.no_updates import no_updates
from normkit.surgery.parameter_groups import ParameterGroups, parameter_groups
from normkit.surgery.replace.convert import convert
from normkit.surgery.replace.freeze import freeze, unfreeze
from normkit.surgery.replace.norm_layer import norm_layer
from normkit.surgery.result import Change, Parity, Surgery
from normkit.surgery.split_state import split_state
from normkit.surgery.statistics.adapt import adapt
from normkit.surgery.statistics.recalibrate import recalibrate
from normkit.surgery.statistics.stream import adapt_stream

__all__ = [
    "Change",
    "CheckpointError",
    "ExportCheck",
    "MismatchError",
    "ParameterGroups",
    "Parity",
    "Surgery",
    "adapt",
    "adapt_stream",
    "check_export",
    "convert",
    "fold",
    "freeze",
    "load",
    "manifest",
    "masked",
    "merge",
    "no_updates",
    "norm_layer",
    "parameter_groups",
    "recalibrate",
    "save",
    "split_state",
    "unfreeze",
]
