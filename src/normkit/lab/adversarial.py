"""A generator and a discriminator, trained against each other in turns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class Gan(nn.Module):
    """Two nets and the size of the latent vectors that images are made from."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module, latent: int) -> None:
        super().__init__()
        self.generator, self.discriminator, self.latent = generator, discriminator, latent

    def draw(self, count: int, source: torch.Generator | None = None) -> Tensor:
        """Latent vectors, uniform between -1 and 1; without a source, from the global random state."""
        return 2 * torch.rand(count, self.latent, generator=source) - 1


class Alternation:
    """A step of the discriminator on real and generated images, then one of the generator on the same ones.

    One optimizer has the parameters of both. It leaves alone those without a gradient, so that each net moves, and has
    momenta, in its own turn only. The losses are the usual ones: cross-entropy of real against generated for the
    discriminator; for the generator, that of generated images taken for real.
    """

    def __init__(self, gan: Gan, optimizer: torch.optim.Optimizer, is_mixed: bool = False) -> None:
        self._gan, self._optimizer, self._is_mixed = gan, optimizer, is_mixed

    def __call__(self, real: Tensor, labels: Tensor | None = None) -> float:
        """Take both steps; return the sum of the losses, which is finite while both are."""
        fake = self._gan.generator(self._gan.draw(len(real)))
        told = self.tell_apart(real, fake.detach())
        fooled = self.fool(fake)
        return told + fooled

    def tell_apart(self, real: Tensor, fake: Tensor) -> float:
        """The discriminator's turn: real and generated images are batches of their own, or mixed in one."""
        net = self._gan.discriminator
        if self._is_mixed:
            of_real, of_fake = net(torch.cat([real, fake])).split([len(real), len(fake)])
        else:
            of_real, of_fake = net(real), net(fake)
        return self._descend(softplus(-of_real).mean() + softplus(of_fake).mean(), net)

    def fool(self, fake: Tensor) -> float:
        """The generator's turn, on images with their graph."""
        return self._descend(softplus(-self._gan.discriminator(fake)).mean(), self._gan.generator)

    def _descend(self, loss: Tensor, net: nn.Module) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=list(net.parameters()))
        self._optimizer.step()
        return loss.item()
