"""Stateless normalization: torch's signatures, and pure forms that return the new statistics."""

from normkit.functional.batch import batch_moments as batch_moments
from normkit.functional.batch import batch_norm as batch_norm
from normkit.functional.batch import batch_norm_update as batch_norm_update
from normkit.functional.within import group_norm as group_norm
from normkit.functional.within import instance_norm as instance_norm
from normkit.functional.within import layer_norm as layer_norm
from normkit.functional.within import local_response_norm as local_response_norm
from normkit.functional.within import rms_norm as rms_norm

__all__ = [
    "batch_moments",
    "batch_norm",
    "batch_norm_update",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "rms_norm",
]
