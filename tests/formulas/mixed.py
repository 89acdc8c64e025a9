"""Layers whose arithmetic is their own: whitening, EvoNorm, switchable and moving-average norms."""
