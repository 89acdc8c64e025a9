"""normkit: normalization for PyTorch that can be trusted. The public names, as one list."""

from typing import TYPE_CHECKING

from normkit import functional, layers
from normkit.affine import scale_shift
from normkit.errors import (
    ArgumentError,
    BackendError,
    DistributedError,
    DtypeError,
    NonFiniteError,
    NormkitError,
    NormkitWarning,
    ShapeError,
    UnsupportedError,
)
from normkit.finding import Finding
from normkit.layers import *  # noqa: F403  # exactly the names of its __all__
from normkit.moments import Moments, ema, population
from normkit.spec import NormSpec, describe

if TYPE_CHECKING:
    __version__: str

    from normkit.doctor.diagnosis import Diagnosis
    from normkit.doctor.examine import examine
    from normkit.doctor.ledger import Ledger
    from normkit.doctor.watch import watch
    from normkit.instruments import Recorder, attach, probes
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
    "ArgumentError",
    "BackendError",
    "Change",
    "CheckpointError",
    "Diagnosis",
    "DistributedError",
    "DtypeError",
    "ExportCheck",
    "Finding",
    "Ledger",
    "MismatchError",
    "Moments",
    "NonFiniteError",
    "NormSpec",
    "NormkitError",
    "NormkitWarning",
    "ParameterGroups",
    "Parity",
    "Recorder",
    "ShapeError",
    "Surgery",
    "UnsupportedError",
    "adapt",
    "adapt_stream",
    "attach",
    "check_export",
    "convert",
    "describe",
    "ema",
    "examine",
    "fold",
    "freeze",
    "functional",
    "layers",
    "load",
    "manifest",
    "masked",
    "merge",
    "no_updates",
    "norm_layer",
    "parameter_groups",
    "population",
    "probes",
    "recalibrate",
    "save",
    "scale_shift",
    "split_state",
    "unfreeze",
    "watch",
]
__all__ += layers.__all__


def __getattr__(name: str) -> object:
    """Load all but layers and values when first asked for: code that only wants these does not wait."""
    if name == "__version__":
        from importlib.metadata import version

        return version("normkit")
    if name in ("Recorder", "attach", "probes"):
        from normkit import instruments

        return getattr(instruments, name)
    if name in ("Diagnosis", "Ledger", "examine", "watch"):
        from normkit import doctor

        return getattr(doctor, name)
    if name in __all__:
        from normkit import surgery

        return getattr(surgery, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
