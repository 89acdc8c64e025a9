"""The arithmetic: `reference` defines what is correct, `select` is the only place that chooses."""

from normkit.kernels import ops as ops  # its operators must be known before a graph that holds them is loaded
