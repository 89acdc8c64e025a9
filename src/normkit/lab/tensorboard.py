"""Records that TensorBoard can show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normkit.json_lines import LineWriter
from normkit.optional import required


class LoggedLineWriter(LineWriter):
    """Writes every number that is measured to a TensorBoard log as well.

    If a trial is resumed, the log holds what was measured after the checkpoint twice: TensorBoard shows the later one.
    """

    def __init__(self, path: Path, size: int, logs: Path, step: int) -> None:
        tensorboard = required("torch.utils.tensorboard", "--tensorboard", "tensorboard", extra="tensorboard")
        super().__init__(path, size)
        self._log = tensorboard.SummaryWriter(str(logs), purge_step=step + 1 if size else None)

    def write(self, line: Mapping[str, Any]) -> int:
        """Write a line to the record, then its numbers to the log."""
        size = super().write(line)
        if "step" in line and "status" not in line:  # measured
            for key, value in line.items():
                if key != "step" and isinstance(value, int | float):
                    self._log.add_scalar(key, value, line["step"])
            self._log.flush()
        return size

    def close(self) -> None:
        """Close the record and the log."""
        super().close()
        self._log.close()
