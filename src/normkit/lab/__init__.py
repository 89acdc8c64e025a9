"""The lab: claims of papers, put to the test on this machine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.lab.comparison import Comparison, compare_runs
    from normkit.lab.conclusion import Conclusion, run_experiment, write_report_of

__all__ = ["Comparison", "Conclusion", "compare_runs", "run_experiment", "write_report_of"]


def __getattr__(name: str) -> object:
    """Load what runs experiments when it is first needed: the models and the data are also used without it."""
    if name in __all__:
        from normkit.lab import comparison, conclusion

        return getattr(comparison if hasattr(comparison, name) else conclusion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
