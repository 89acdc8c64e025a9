"""Bits per character, against a plain computation."""

from dataclasses import replace
from itertools import islice
from math import log2

import pytest
import torch
from torch import nn

from normkit.lab.data.texts import text_set
from normkit.lab.prediction import Prediction, loss

TEXT = text_set("own", "it was the worst of times, it was an age " * 40)  # 164 characters to test on


class Following(nn.Module):
    """Logits that depend on a position's own character."""

    def __init__(self, alphabet):
        super().__init__()
        self.table = torch.randn(alphabet, alphabet, dtype=torch.float64)

    def forward(self, x):
        return self.table[x]


@pytest.mark.parametrize("length", [1, 7, 10, 163])
@pytest.mark.parametrize("windows", [2, 64])
def test_every_character_but_the_first_is_predicted_once(monkeypatch, length, windows):
    monkeypatch.setattr("normkit.lab.prediction._WINDOWS", windows)
    model = Following(len(TEXT.alphabet))
    found = Prediction(TEXT, length).measure(model)
    seen = 163 // length * length
    probabilities = model.table.softmax(1).tolist()
    pairs = list(zip(TEXT.test[:seen].tolist(), TEXT.test[1 : seen + 1].tolist(), strict=True))
    assert found["bits"] == pytest.approx(sum(-log2(probabilities[a][b]) for a, b in pairs) / seen)
    right = [max(range(len(of)), key=of.__getitem__) == b for a, b in pairs for of in [probabilities[a]]]
    assert found["accuracy"] == pytest.approx(sum(right) / seen)


def test_a_part_of_the_test_text():
    model = Following(len(TEXT.alphabet))
    short = replace(TEXT, test=TEXT.test[:50])
    assert Prediction(TEXT, 10, test=50).measure(model) == Prediction(short, 10).measure(model)


def test_a_model_that_says_nothing_needs_the_logarithm_of_the_alphabet():
    alphabet = len(TEXT.alphabet)
    found = Prediction(TEXT, 10).measure(lambda x: torch.zeros(*x.shape, alphabet))
    assert found["bits"] == pytest.approx(log2(alphabet))


def test_the_code_by_frequencies_and_the_accuracy_of_the_commonest():
    task, train = Prediction(TEXT, 10), TEXT.train.tolist()
    counts = [train.count(place) + 1 for place in range(len(TEXT.alphabet))]
    tested = TEXT.test[1:161].tolist()
    assert task.unigram == pytest.approx(sum(log2(sum(counts) / counts[place]) for place in tested) / 160)
    assert TEXT.alphabet[max(set(train), key=train.count)] == " "
    assert task.chance == pytest.approx(tested.count(TEXT.alphabet.index(" ")) / 160)


def test_a_character_that_training_never_shows_has_a_code():
    task = Prediction(text_set("own", "a" * 90 + "ba" * 5), 3)
    assert 1 < task.unigram < 10


def test_batches_are_of_the_training_text():
    task = Prediction(text_set("own", "a" * 900 + "b" * 100), 8)
    batches = list(islice(task.batches(4, seed=0, start=0), 5))
    assert not any(part.any() for batch in batches for part in batch)
    assert {tuple(x.shape) for x, _ in batches} == {(4, 8)}


def test_the_loss_is_the_mean_over_all_positions():
    logits, y = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    expected = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(loss(logits, y), expected)
