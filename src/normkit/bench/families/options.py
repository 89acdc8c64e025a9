"""All that one can combine in a BatchNorm, thinned so that every pair of choices meets in some case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, get_args

import torch

from normkit.activations import ActivationName
from normkit.bench.case import Case
from normkit.bench.contestants import batch_norm
from normkit.bench.families.batch import MODES
from normkit.bench.layer_case import Extra, Input, LayerCase, Layout, Mode

_SHAPES: dict[Layout, tuple[int, ...]] = {
    "contiguous": (16, 64, 28, 28),
    "channels_last": (16, 64, 28, 28),
    "slice": (16, 64, 28, 28),
    "transposed": (16, 64, 784),
    "every other": (16, 64, 28, 28),
}

OPTIONS: dict[str, Sequence[Any]] = {
    "activation": (None, *get_args(ActivationName)),
    "layout": tuple(_SHAPES),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "mask": (False, True),
    "residual": (False, True),
    "mode": MODES,
}

Choice = dict[str, Any]
Pair = tuple[str, Any, str, Any]  # an option and its value, and another's


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return combinations in which every two values of two options meet.

    Each is chosen to add the most new pairs, and of such as do, the one whose values were chosen least so far.
    """
    candidates = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    pairs = [_pairs(candidate) for candidate in candidates]
    missing = set().union(*pairs)
    chosen: list[Choice] = []
    uses: Counter[tuple[str, Any]] = Counter()

    def gain(i: int) -> tuple[int, int]:
        used = sum(uses[item] * len(options[item[0]]) for item in candidates[i].items())
        return len(missing & pairs[i]), -used

    while missing:
        best = max(range(len(candidates)), key=gain)
        chosen.append(candidates[best])
        uses.update(candidates[best].items())
        missing -= pairs[best]
    return chosen


def _pairs(choice: Choice) -> set[Pair]:
    return {(a, choice[a], b, choice[b]) for a, b in combinations(choice, 2)}


def options() -> Iterator[Case]:
    """BatchNorm with every pair of options, beside the same written with torch's operators."""
    order = {name: values.index for name, values in OPTIONS.items()}
    for choice in sorted(pairwise(OPTIONS), key=lambda c: [order[name](value) for name, value in c.items()]):
        yield _case(**choice)


def _case(
    activation: ActivationName | None, layout: Layout, dtype: torch.dtype, mask: bool, residual: bool, mode: Mode
) -> Case:
    x = Input(_SHAPES[layout], layout, dtype)
    given: dict[Extra, bool] = {"residual": residual, "mask": mask}
    extras = tuple(name for name, is_given in given.items() if is_given)
    return LayerCase(
        "options",
        x,
        batch_norm(x.shape, activation, masked=mask),
        " + ".join(["BN", *extras, *([activation] if activation else [])]),
        mode,
        extras,
        torch.promote_types(dtype, torch.float32),
        quick=True,  # without some of them, pairs would be missing
        tags={"activation": activation, "mask": mask, "residual": residual},
    )
