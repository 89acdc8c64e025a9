"""The hint at the end of errors about unknown names."""

import pytest

from normkit.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gruop", ' Did you mean "group"?'),
        ("GROUP", ' Did you mean "group"?'),
        ("cifar1O", ' Did you mean "CIFAR10"?'),
        ("zebra", ""),
        (None, ""),
    ],
)
def test_the_nearest_known_name_is_suggested_whatever_its_case(name, hint):
    assert did_you_mean(name, ["group", "instance", "CIFAR10"]) == hint
