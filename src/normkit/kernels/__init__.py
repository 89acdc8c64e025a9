"""The arithmetic: `reference` defines what is correct, `select` is the only place that chooses."""
