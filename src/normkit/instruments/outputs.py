"""Where records go while they are made, and how they are read again: files of JSON lines, TensorBoard's logs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from normkit.json_lines import Line, RecordError, read_lines
from normkit.optional import required


class Output(Protocol):
    """Takes records as they come."""

    def write(self, record: Line) -> object:
        """Take one."""

    def close(self) -> None:
        """Take no more."""


class LogOutput:
    """TensorBoard's scalars, as probe/layer/number."""

    def __init__(self, folder: Path) -> None:
        tensorboard = required("torch.utils.tensorboard", "tensorboard=", "tensorboard", extra="tensorboard")
        self._log = tensorboard.SummaryWriter(str(folder))

    def write(self, record: Line) -> None:
        """Write every plain number of a record."""
        for key, value in numbers_of(record).items():
            self._log.add_scalar("/".join(filter(None, (record["probe"], record["layer"], key))), value, record["step"])
        self._log.flush()

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def numbers_of(record: Line) -> dict[str, float]:
    """What was measured, without what says where and when."""
    found = {key: value for key, value in record.items() if key not in ("step", "probe", "layer")}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def read_records(path: str | Path) -> list[Line]:
    """Read a file of records; a last line that was cut short is left out."""
    path = Path(path)
    if not path.is_file():
        raise RecordError(f"there is no file {path}. Give one that attach(out=...) or recorder.save() wrote.")
    records = [_with_floats(line) for line in read_lines(path)]
    odd = next((i for i, r in enumerate(records, 1) if not {"step", "probe", "layer"} <= r.keys()), None)
    if odd is not None or not records:
        what = "holds no record" if odd is None else f"line {odd} has no step, probe and layer"
        raise RecordError(f"{path} is not a file of records: {what}. Give one that attach(out=...) wrote.")
    return records


def _with_floats(record: Line) -> Line:
    """What JSON has no number for, as numbers again."""
    odd = {key for key, value in record.items() if value in ("nan", "inf", "-inf")} - {"probe", "layer"}
    return {key: float(value) if key in odd else value for key, value in record.items()}
