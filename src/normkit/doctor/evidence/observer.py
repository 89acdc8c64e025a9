"""Watching what norms are given while a model runs."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.doctor.evidence.given import Given, given, input_of
from normkit.doctor.evidence.runs import Runs
from normkit.doctor.evidence.statistics import Call, LayerStatistics, plain
from normkit.hooks import BeforeForward, hooked
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments
from normkit.surgery.norms import Norm, channels_second
from normkit.surgery.statistics import collect
from normkit.surgery.statistics.tally import moments_of

_LOOKED_AT = 4  # batches on which shapes, eps and padding are looked at


def takes_batch_moments(norm: Norm) -> bool:
    """Whether a norm's statistics are the mean and variance of batches, stored or not."""
    return norm.spec.stores_batch_moments and isinstance(norm.layer, _BatchNorm | ChannelNorm)


def stores_batch_moments(norm: Norm) -> bool:
    """Whether it also stores them, so that they can be exchanged for others."""
    return takes_batch_moments(norm) and norm.layer._buffers.get("running_var") is not None


class Observer:
    """Collects what norms are given; those that store statistics normalize with each batch's own meanwhile.

    Attributes:
        statistics: by name, of norms across examples, in the order in which they first run.
        given: by name, the calls of every norm on the first batches.
    """

    def __init__(self, norms: list[Norm], runs: Runs) -> None:
        self._norms, self._runs = norms, runs
        self._calls: Counter[tuple[int, str]] = Counter()
        self.statistics: dict[str, LayerStatistics] = {}
        self.given: dict[str, list[Given]] = {}
        self._stored = {norm.name: LayerStatistics.of(norm) for norm in norms if takes_batch_moments(norm)}

    def watching(self) -> AbstractContextManager[None]:
        """Watch while the block runs, which must give the norms their own statistics back."""
        return hooked(before=[(norm.layer, self._hook(norm)) for norm in self._norms])

    def _hook(self, norm: Norm) -> BeforeForward:
        def see(layer: nn.Module, args: Any, kwargs: Any) -> None:
            x = input_of(args, kwargs)
            if x is None:
                return
            if self._runs.current < _LOOKED_AT:
                looked = given(norm, self._runs.current, x, kwargs.get("mask"))
                self.given.setdefault(norm.name, []).append(looked)
            if norm.name in self._stored:
                self._see_moments(norm, args, kwargs)

        return see

    def _see_moments(self, norm: Norm, args: Any, kwargs: Any) -> None:
        is_stored = stores_batch_moments(norm)
        if is_stored:
            x, mask = collect.given(norm, args, kwargs)
            moments, examples = collect.batch_moments(norm, x, mask)
        else:
            x = channels_second(norm, args[0] if args else kwargs["input"])
            moments, examples = moments_of(x, x.shape[1:2], None), len(x)
        known = self.statistics.setdefault(norm.name, self._stored[norm.name])
        batch = self._runs.current
        call = Call(batch, self._calls[batch, norm.name], tuple(x.shape), examples, flat(moments), _scatter(x, moments))
        self._calls[batch, norm.name] += 1
        known.calls.append(call)
        if is_stored and call.is_finite and call.values > 1:
            collect.as_if_stored(norm.layer, moments)


def flat(moments: Moments) -> Moments:
    """The same in one dimension, in double precision, on the CPU."""
    count = moments.count
    return Moments(plain(moments.mean), plain(moments.var), int(count.min()) if isinstance(count, Tensor) else count)


def _scatter(x: Tensor, moments: Moments) -> Tensor:
    """Per channel, the sum of squares of the examples' means about their own mean."""
    means = x.detach().reshape(len(x), moments.mean.numel(), -1).mean(-1, dtype=torch.float32)
    return plain((means - means.mean(0)).square().sum(0))


def training_moments(norms: list[Norm], runs: Runs) -> dict[str, Moments]:
    """What norms that store statistics are given in the present mode, pooled over the batches."""
    found: dict[str, Moments] = {}

    def take(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        moments = flat(collect.batch_moments(norm, x, mask)[0])
        if moments.mean.isfinite().all() and moments.var.isfinite().all():
            found[norm.name] = found[norm.name].merge(moments) if norm.name in found else moments

    with collect.showing([norm for norm in norms if stores_batch_moments(norm)], take):
        runs(lambda index, output: None, runs.left[:_LOOKED_AT])
    return found
