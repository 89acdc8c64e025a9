"""Which part of a batch is the input, what errors say, and where tensors are found."""

from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normkit import ArgumentError
from normkit.batches import (
    each_batch,
    feed,
    in_evaluation,
    leaves_in,
    map_leaves,
    moved,
    repeatable,
    target_in,
    tensors_in,
)


class Sum(nn.Module):
    def forward(self, x, y=0):
        return x + y


X, Y = torch.randn(3), torch.randn(3)
Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    logits: Tensor
    others: tuple


@dataclass(frozen=True)
class Fixed:
    x: Tensor
    length: int = field(init=False, default=3)


@pytest.mark.parametrize(
    ("batch", "output"),
    [(X, X), ((X, Y), X), ([X], X), ({"x": X, "y": Y}, X + Y), (Pair(X, Y), X)],
    ids=["tensor", "tuple", "list", "dict", "named tuple"],
)
def test_the_input_is_the_tensor_or_the_first_element_or_keyword_arguments(batch, output):
    assert torch.equal(feed(Sum(), batch), output)


def test_another_forward_takes_the_whole_batch():
    assert torch.equal(feed(Sum(), (X, Y), lambda model, batch: model(*batch)), X + Y)


class Both(nn.Module):
    def forward(self, x, y, *more, scale=1.0):
        assert more == ()  # they are targets
        return (x - y) * scale


class Anything(nn.Module):
    def forward(self, *inputs, **options):
        return inputs


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_tuple_holds_as_many_inputs_as_forward_requires(wrap):
    for batch in ((X, Y), (X, Y, torch.tensor(0)), [X, Y, X, Y]):
        assert torch.equal(feed(wrap(Both()), batch), X - Y)
    assert feed(Anything(), (X, Y)) == (X,)  # nothing is required: the first is the input


def test_a_scripted_model_takes_the_first_element():
    assert torch.equal(feed(torch.jit.trace(Sum(), X), (X, Y)), X)


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [(Sum(), (), r"requires \(x\); got a tuple of 0"), (Both(), [X], r"requires \(x, y\); got a list of 1")],
)
def test_a_batch_with_too_few_inputs_is_refused(model, batch, said):
    with pytest.raises(ArgumentError, match=said):
        feed(model, batch)


def test_batches_of_lists_loaders_and_iterators_come_in_order():
    assert list(each_batch([1, 2, 3])) == [1, 2, 3]
    assert len(list(each_batch(DataLoader(torch.randn(5, 2), batch_size=2)))) == 3
    assert list(each_batch(iter([1, 2]))) == [1, 2]


def test_no_batches_are_an_error_that_speaks_of_generators():
    spent = (batch for batch in [X])
    list(spent)
    for empty in ([], spent):
        with pytest.raises(ArgumentError, match="only once"):
            each_batch(empty)


@pytest.mark.parametrize("wrong", [X, {"x": X}, 3, "data"])
def test_one_batch_is_not_an_iterable_of_them(wrong):
    with pytest.raises(ArgumentError, match=r"Pass \[batch\]"):
        each_batch(wrong)


def test_iterators_cannot_be_repeated():
    assert repeatable([1], "this") == [1]
    with pytest.raises(ArgumentError, match="exact=True iterates over the batches more than once"):
        repeatable(iter([1]), "exact=True")


def test_tensors_are_found_in_any_nesting():
    nested = {"a": [X, (Y, "text")], "b": Output(X, (Pair(Y, None),))}
    assert [id(tensor) for tensor in tensors_in(nested)] == [id(X), id(Y), id(X), id(Y)]
    assert tensors_in(Output) == []


def test_moving_keeps_the_structure():
    meta = moved({"a": [X, Pair(Y, 3)], "b": "text"}, torch.device("meta"))
    assert meta["a"][0].is_meta
    assert type(meta["a"][1]) is Pair
    assert meta["a"][1].a.is_meta
    assert (meta["a"][1].b, meta["b"]) == (3, "text")


def test_dataclasses_are_moved_too_and_the_original_is_not():
    batch = Output(X, (Fixed(Y), None))
    meta = moved(batch, torch.device("meta"))
    assert all(tensor.is_meta for tensor in tensors_in(meta))
    assert [type(part) for part in (meta, meta.others[0])] == [Output, Fixed]
    assert meta.others[0].length == 3
    assert not any(tensor.is_meta for tensor in tensors_in(batch))


def test_a_model_gets_a_dataclass_batch_on_its_own_device():
    model = nn.Linear(3, 2, device="meta")
    assert feed(model, Output(X, ()), lambda model, batch: model(batch.logits)).is_meta


def test_every_container_is_walked_alike():
    containers = [[1], (1,), {1}, frozenset({1}), {"a": 1}, Pair(1, 1), Output(1, 1)]
    for container in containers:
        doubled = map_leaves(container, lambda leaf: 2 * leaf)
        assert type(doubled) is type(container)
        assert set(leaves_in(doubled)) == {2}


def test_each_layer_gets_its_own_mode_back():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    model[1].eval()
    with in_evaluation(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False]


def test_the_target_is_what_follows_the_inputs():
    class Two(nn.Module):
        def forward(self, a, b, c=None):
            return a + b

    x, y, z, w = torch.arange(4).unbind()
    assert target_in(nn.Identity(), (x, y)) is y
    assert target_in(nn.Identity(), [x, y, z]) == (y, z)
    assert target_in(Two(), (x, y, z)) is z
    assert target_in(Two(), (x, y, z, w)) == (z, w)
    assert target_in(nn.Identity(), batch := (x,)) is batch
    assert target_in(nn.Identity(), batch := {"x": x}) is batch
