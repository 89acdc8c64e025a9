"""Stateless normalization: torch's signatures, and pure forms that return the new statistics."""

from normkit.functional.batch import batch_moments as batch_moments
from normkit.functional.batch import batch_norm as batch_norm
from normkit.functional.batch import batch_norm_update as batch_norm_update

__all__ = ["batch_moments", "batch_norm", "batch_norm_update"]
