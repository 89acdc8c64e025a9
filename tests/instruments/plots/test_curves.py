"""Which names are chosen, and how many."""

from itertools import pairwise

from normkit.instruments.plots.curves import evenly


def test_names_are_chosen_evenly_with_both_ends():
    names = [str(i) for i in range(100)]
    for most in (2, 5, 12, 99):
        chosen = [int(name) for name in evenly(names, most)]
        gaps = {b - a for a, b in pairwise(chosen)}
        assert (len(set(chosen)), chosen[0], chosen[-1]) == (most, 0, 99)
        assert max(gaps) - min(gaps) <= 1
    assert evenly(names, 100) == names
    assert evenly([], 12) == []
