"""One training run over several processes, which torchrun starts: its ranks."""

from normkit.lab.ranks.group import is_first_rank, is_launched, rank_count
from normkit.lab.ranks.options import PRECISIONS, StepOptions
from normkit.lab.ranks.run import is_restarted, run_over_ranks

__all__ = ["PRECISIONS", "StepOptions", "is_first_rank", "is_launched", "is_restarted", "rank_count", "run_over_ranks"]
