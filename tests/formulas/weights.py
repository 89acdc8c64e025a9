"""Normalisation of weights."""
