"""The ledger that `watch` keeps of a run."""

from normkit.doctor.ledger.account import Entry
from normkit.doctor.ledger.ledger import WATCH, Ledger

__all__ = ["WATCH", "Entry", "Ledger"]
