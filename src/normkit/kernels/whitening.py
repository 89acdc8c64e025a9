"""Inverse square roots of covariance matrices, (..., g, g), symmetric and positive definite.

The usual derivative through an eigendecomposition divides by differences of eigenvalues, and is lost where two are
equal. That of the square root divides by their sums, which are positive: dR solves R dR + dR R = dSigma.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def newton(sigma: Tensor, iterations: int) -> Tensor:
    """Approximate sigma^(-1/2) by Newton's iteration (Huang et al. 2019): matrix products and nothing else."""
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    z = eye.expand_as(sigma)
    y = sigma / trace  # eigenvalues in 0..1, where the iteration converges
    # P <- (3 P - P^3 S) / 2 with z = P and y = P S: carried along rather than multiplied anew, y keeps rounding from
    # growing without bound once P has converged.
    for _ in range(iterations):
        step = 1.5 * eye - 0.5 * z @ y
        y, z = y @ step, step @ z
    return z / trace.sqrt()


def zca(sigma: Tensor, floor: float) -> Tensor:
    """Return sigma^(-1/2), of a sigma whose eigenvalues are at least `floor`."""
    root = _compiled_root(sigma, floor) if torch.compiler.is_compiling() else square_root(sigma, floor)
    return cast(Tensor, torch.linalg.inv_ex(root)[0])  # of NaN it is NaN, where torch.linalg.inv may raise


def square_root(sigma: Tensor, floor: float = 0.0) -> Tensor:
    """Return the symmetric R with R R = sigma."""
    return cast(Tensor, SquareRoot.apply(sigma, floor)[0])


def lyapunov(a: Tensor, b: Tensor) -> Tensor:
    """Return the X with A X + X A = B, for a symmetric positive definite A."""
    return cast(Tensor, Lyapunov.apply(a, b, *torch.linalg.eigh(a.detach())))


class SquareRoot(torch.autograd.Function):
    """R = sigma^(1/2), with its eigenvalues and eigenvectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sigma: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute by eigendecomposition."""
        values, basis = _eigen(sigma, floor)
        return _compose(values, basis), values, basis

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the root, and its eigenvectors to solve with."""
        root, values, basis = output
        ctx.mark_non_differentiable(values, basis)
        ctx.save_for_backward(root, values, basis)
        ctx.save_for_forward(root, values, basis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the dsigma with R dsigma + dsigma R = dR."""
        root, values, basis = ctx.saved_tensors
        return Lyapunov.apply(root, grads[0], values, basis), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
        """The equation is its own adjoint: forward mode solves the same."""
        root, values, basis = ctx.saved_tensors
        return Lyapunov.apply(root, tangents[0], values, basis), None, None


class Lyapunov(torch.autograd.Function):
    """X with A X + X A = B. The eigenvalues and eigenvectors of A come along: one decomposition serves all orders."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, values: Tensor, basis: Tensor) -> Tensor:
        """Divide by the sums of eigenvalues, in the eigenvectors' basis."""
        return _solve(b, values, basis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep A, X, and what to solve with."""
        a, _, values, basis = inputs
        ctx.save_for_backward(a, output, values, basis)
        ctx.save_for_forward(a, output, values, basis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return dB = Y with A Y + Y A = dX, and dA = -(Y X' + X' Y)."""
        a, x, values, basis = ctx.saved_tensors
        y = Lyapunov.apply(a, dx, values, basis)
        return -(y @ x.mT + x.mT @ y), y, None, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, *_: Any) -> Tensor:
        """A dX + dX A = dB - dA X - X dA."""
        a, x, values, basis = ctx.saved_tensors
        right = torch.zeros_like(x) if db is None else db
        if da is not None:
            right = right - da @ x - x @ da
        return cast(Tensor, Lyapunov.apply(a, right, values, basis))


def _compiled_root(sigma: Tensor, floor: float) -> Tensor:
    """The square root in operators that a compiler sees through, with the same first derivative.

    What is added is zero, and the derivative's value.
    """
    values, basis = _eigen(sigma.detach(), floor)
    return _compose(values, basis) + _solve(sigma - sigma.detach(), values, basis)


def _eigen(sigma: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the square root; NaN of what is not finite, where eigh would raise."""
    finite = sigma.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    eye = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    values, basis = torch.linalg.eigh(torch.where(finite, sigma, eye))
    # Rounding can take an eigenvalue below what was added to all of them, or below zero.
    return torch.where(finite[..., 0], values.clamp(min=floor).sqrt(), torch.nan), basis


def _compose(values: Tensor, basis: Tensor) -> Tensor:
    return (basis * values[..., None, :]) @ basis.mT


def _solve(b: Tensor, values: Tensor, basis: Tensor) -> Tensor:
    sums = values[..., :, None] + values[..., None, :]
    return basis @ ((basis.mT @ b @ basis) / sums) @ basis.mT
