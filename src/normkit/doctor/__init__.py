"""What is wrong with a model's normalization: which layers, why, and what to do about it."""

from normkit.doctor import rules  # noqa: F401  # importing them registers them
from normkit.doctor.diagnosis import Diagnosis
from normkit.doctor.examine import examine
from normkit.doctor.ledger import Ledger
from normkit.doctor.rule import RULES, Rule
from normkit.doctor.watch import watch

__all__ = ["RULES", "Diagnosis", "Ledger", "Rule", "examine", "watch"]
