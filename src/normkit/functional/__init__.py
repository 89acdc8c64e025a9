"""Stateless normalization: torch's signatures, and pure forms that return the new statistics."""

from normkit.functional.batch import batch_moments, batch_norm, batch_norm_update
from normkit.functional.within import group_norm, instance_norm, layer_norm, local_response_norm, rms_norm

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
