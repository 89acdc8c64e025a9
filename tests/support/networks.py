"""Networks that others wrote, as parameters of tests that only look at a model: a few of them in the ordinary run."""

import pytest

from support.architectures import ARCHITECTURES
from support.language_models import LANGUAGE_MODELS

built_by_others = pytest.mark.parametrize(
    "build",
    [
        *(pytest.param(one.build, id=one.name, marks=() if one.quick else pytest.mark.deep) for one in ARCHITECTURES),
        *(pytest.param(one.build, id=one.name, marks=pytest.mark.deep) for one in LANGUAGE_MODELS),
    ],
)
