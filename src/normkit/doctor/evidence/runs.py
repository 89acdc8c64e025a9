"""The model on the batches, as often as rules need it, and the batches that a norm cannot take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from normkit.batches import Forward, device_of, feed, moved
from normkit.named_layers import named_layers
from normkit.surgery.check_export.batch_mates import batch_size
from normkit.surgery.no_updates import no_updates, uncompiled

_SINGLE = re.compile("more than 1 value per channel")  # torch's words and ours
_SINGLE_WITHIN = re.compile("more than 1 spatial element|a single one always becomes zero")


class Refusal(NamedTuple):
    """A layer that raised because it was given one value where it needs several.

    Attributes:
        layer: its name.
        batch: the number of the batch.
        is_within: whether it takes its statistics within each example.
        message: what it said.
    """

    layer: str
    batch: int
    is_within: bool
    message: str


class Runs:
    """Runs a model on batches. One that a norm refuses for too few values is left out from then on."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> None:
        self.model, self.forward = model, forward
        self.batches = [moved(batch, device_of(model)) for batch in batches]
        self.left = list(range(len(self.batches)))
        self.refusals: list[Refusal] = []
        self.current = -1  # the number of the batch that runs

    def __call__(self, use: Callable[[int, Any], None], which: Iterable[int] | None = None) -> None:
        """Run on each batch, or on those of these numbers, and pass number and output to `use`."""
        wanted = set(self.left) if which is None else set(which)
        for index in [i for i in self.left if i in wanted]:
            self.current = index
            try:
                with uncompiled():
                    output = feed(self.model, self.batches[index], self.forward)
            except ValueError as error:
                self._refuse(index, error)
            except Exception as error:
                _say_where(error, index)
                raise
            else:
                use(index, output)

    def _refuse(self, index: int, error: ValueError) -> None:
        """Leave a batch out that is too small for a norm; raise any other error again."""
        is_within = _SINGLE_WITHIN.search(str(error)) is not None
        if not is_within and _SINGLE.search(str(error)) is None:
            _say_where(error, index)
            raise error
        self.left.remove(index)
        self.refusals.append(Refusal(self._raised_in(error.__traceback__), index, is_within, str(error)))

    def _raised_in(self, traceback: TracebackType | None) -> str:
        """The innermost layer whose method an error went through."""
        names = {id(layer): name for name, layer in named_layers(self.model)}
        found = ""
        while traceback is not None:
            found = names.get(id(traceback.tb_frame.f_locals.get("self")), found)
            traceback = traceback.tb_next
        return found

    @property
    def several(self) -> Any:
        """The first batch of more than one example, or else the first; None if none is left."""
        left = [self.batches[i] for i in self.left]
        return next((batch for batch in left if (batch_size(batch) or 0) > 1), left[0] if left else None)


def _say_where(error: Exception, index: int) -> None:
    error.add_note(f"The model was run by normkit's doctor on batch {index} (the first is 0); it is left as it was.")


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Training mode as the model's own train() sets it, without gradients and without writes to statistics.

    It does not give modes back: the caller restores the model.
    """
    model.train()
    with torch.no_grad(), no_updates(model):
        yield


@contextmanager
def in_own_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode as the model's own eval() sets it, which may not reach every layer; otherwise as above."""
    model.eval()
    with torch.no_grad(), no_updates(model):
        yield
