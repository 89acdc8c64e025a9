"""The lab: claims of papers, put to the test on this machine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.lab.conclusion import Conclusion, run_experiment, write_report_of

__all__ = ["Conclusion", "run_experiment", "write_report_of"]


def __getattr__(name: str) -> object:
    """Load what runs experiments when it is first needed: the models and the data are also used without it."""
    if name in __all__:
        from normkit.lab import conclusion

        return getattr(conclusion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
