from itertools import combinations, product

from normkit.bench.families.options import OPTIONS, options, pairwise


def pairs(choices, a, b):
    return {(choice[a], choice[b]) for choice in choices}


def test_every_pair_of_values_meets():
    chosen = pairwise(OPTIONS)
    for a, b in combinations(OPTIONS, 2):
        assert pairs(chosen, a, b) == set(product(OPTIONS[a], OPTIONS[b]))


def test_there_are_few_more_combinations_than_the_two_longest_options_need():
    longest, second = sorted((len(values) for values in OPTIONS.values()), reverse=True)[:2]
    assert longest * second <= len(pairwise(OPTIONS)) <= 1.5 * longest * second


def test_no_value_is_chosen_much_more_often_than_its_share():
    chosen = pairwise(OPTIONS)
    for option, values in OPTIONS.items():
        share = len(chosen) / len(values)
        assert all(0.7 * share <= sum(c[option] == value for c in chosen) <= 1.4 * share for value in values)


def test_two_options_are_all_of_their_product():
    assert len(pairwise({"a": "xyz", "b": (1, 2)})) == 6


def test_the_cases_are_the_choices():
    cases = list(options())
    assert len(cases) == len(pairwise(OPTIONS))
    for case in cases:
        assert case.tags["mask"] == ("mask" in case.extras)
        assert case.tags["residual"] == ("residual" in case.extras)
        assert (case.tags["activation"] or "") in case.title
