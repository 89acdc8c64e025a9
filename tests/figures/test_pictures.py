"""Pictures are the pixels that they were made of, in records and on pages."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from normkit.figures.pictures import row_of


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_images_are_side_by_side(channels, mode):
    pixels = torch.randint(0, 256, (5, channels, 4, 6), dtype=torch.uint8)
    image = Image.open(io.BytesIO(base64.b64decode(row_of(pixels))))
    assert (image.mode, image.size) == (mode, (30, 4))
    shown = np.asarray(image).reshape(4, 30, channels)
    for i, expected in enumerate(pixels):
        assert np.array_equal(shown[:, 6 * i : 6 * i + 6], expected.permute(1, 2, 0).numpy())
