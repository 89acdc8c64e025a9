"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

import hashlib

import torch


def generator(purpose: str, seed: int, number: int) -> torch.Generator:
    """A generator for one purpose at one epoch or step."""
    digest = hashlib.sha256(f"{purpose} {seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
