"""Verbs that leave layers which they were asked to change, and say so."""

import pytest

import normkit as nk


def warned(verb, *arguments, **options):
    """The result of a verb that must warn of what it leaves."""
    with pytest.warns(nk.NormkitWarning, match="asked for (is|are) left as before"):
        return verb(*arguments, **options)
