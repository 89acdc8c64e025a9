"""One row per layer (and per option that changes its arithmetic). Every conformance test runs over all rows."""

from support.case import Case as Case
from support.case import randomize_ as randomize_
from support.case import taking_part as taking_part
from support.rows import across, mixed, pointwise, relatives, weights, within

CASES = [*across.ROWS, *relatives.ROWS, *within.ROWS, *pointwise.ROWS, *mixed.ROWS, *weights.ROWS]
TWINS = [case for case in CASES if case.twin is not None]
