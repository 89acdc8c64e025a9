"""The arithmetic: `reference` defines what is correct, and `select` chooses who computes it."""

from normkit.kernels import ops as ops  # its operators must be known before a graph that holds them is loaded
