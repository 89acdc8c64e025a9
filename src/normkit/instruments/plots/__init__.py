"""What probes recorded, drawn: from records alone, whoever made them."""

from normkit.instruments.plots.plot import Plot, plot, report
from normkit.instruments.plots.runs import recorded_files, report_of

__all__ = ["Plot", "plot", "recorded_files", "report", "report_of"]
