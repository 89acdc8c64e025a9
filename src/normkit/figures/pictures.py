"""Pixels as text, which records keep and pages show."""

from __future__ import annotations

import base64
import io

from torch import Tensor

from normkit.optional import required


def row_of(pixels: Tensor) -> str:
    """Images side by side, uint8 (N, C, H, W) in grey or colour, as a PNG file in base64."""
    row = pixels.permute(2, 0, 3, 1).flatten(1, 2)  # (H, N * W, C)
    buffer = io.BytesIO()
    image = required("PIL.Image", "A picture", "pillow").fromarray(row.squeeze(2).numpy())
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
