"""Each net moves in its own turn, on the batches that its statistics should be of."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import normkit as nk
from normkit.lab.adversarial import Alternation, Gan
from normkit.lab.models import dcgan


def gan_of(norm=nk.BatchNorm2d):
    return Gan(*dcgan(norm, width=4, latent=6), 6)


def adam(gan):
    return torch.optim.Adam(gan.parameters(), lr=0.01, betas=(0.5, 0.999))


def real_images(count=8):
    return torch.rand(count, 1, 28, 28) * 2 - 1


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def moved(net, before):
    return {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}


def test_the_discriminators_turn_moves_the_discriminator():
    gan = gan_of()
    fake = gan.generator(gan.draw(8)).detach()
    before = state_of(gan.generator), state_of(gan.discriminator)
    Alternation(gan, adam(gan)).tell_apart(real_images(), fake)
    assert moved(gan.generator, before[0]) == set()
    assert {name for name, _ in gan.discriminator.named_parameters()} <= moved(gan.discriminator, before[1])


def test_the_generators_turn_moves_the_generator():
    """The discriminator has momenta already, which must not move it. Its statistics move, and are not used."""
    gan = gan_of()
    alternation = Alternation(gan, adam(gan))
    alternation(real_images())
    fake = gan.generator(gan.draw(8))
    before = state_of(gan.generator), state_of(gan.discriminator)
    alternation.fool(fake)
    parameters = {name for name, _ in gan.generator.named_parameters()}
    assert moved(gan.generator, before[0]) == parameters
    assert moved(gan.discriminator, before[1]).isdisjoint(name for name, _ in gan.discriminator.named_parameters())


@pytest.mark.parametrize("is_mixed", [False, True])
def test_real_and_generated_images_are_batches_of_their_own_unless_mixed(is_mixed):
    gan, real, seen = gan_of(), real_images(), []
    gan.discriminator.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    gan.generator.register_forward_hook(lambda _, inputs, output: seen.append(output.detach().clone()))
    Alternation(gan, adam(gan), is_mixed)(real)
    fake, *batches = seen
    expected = [torch.cat([real, fake])] if is_mixed else [real, fake]
    assert len(batches) == len(expected) + 1
    assert all(torch.equal(a, b) for a, b in zip(batches, [*expected, fake], strict=True))


def test_without_norms_it_does_not_matter_how_images_are_batched():
    one = gan_of(None)
    other, real = copy.deepcopy(one), real_images()
    fake = one.generator(one.draw(8)).detach()
    losses = [Alternation(gan, adam(gan), mixed).tell_apart(real, fake) for gan, mixed in ((one, False), (other, True))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def sgd(net):
    """With momenta; Adam would make a step of what rounding leaves of a gradient of 0."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def test_one_optimizer_does_what_one_for_each_net_does():
    """On images of four numbers."""
    generator = nn.Sequential(nn.Linear(3, 5), nk.BatchNorm1d(5, activation="relu"), nn.Linear(5, 4), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(4, 5), nk.BatchNorm1d(5, activation="relu"), nn.Linear(5, 1), nn.Flatten(0))
    ours = Gan(generator, discriminator, 3)
    theirs = copy.deepcopy(ours)
    alternation = Alternation(ours, sgd(ours))
    optimizers = sgd(theirs.generator), sgd(theirs.discriminator)
    for real in torch.randn(4, 16, 4):
        random = torch.get_rng_state()
        total = alternation(real)
        torch.set_rng_state(random)
        fake = theirs.generator(theirs.draw(16))
        told = cross_entropy(theirs.discriminator(real), torch.ones(16))
        told = told + cross_entropy(theirs.discriminator(fake.detach()), torch.zeros(16))
        theirs.zero_grad()
        told.backward()
        optimizers[1].step()
        fooled = cross_entropy(theirs.discriminator(fake), torch.ones(16))
        theirs.zero_grad()
        fooled.backward()
        optimizers[0].step()
        assert total == pytest.approx(told.item() + fooled.item(), rel=1e-4)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-3, atol=1e-4, msg=name)


def test_latent_vectors_are_uniform_and_follow_their_source():
    gan = gan_of()
    drawn = gan.draw(2000)
    assert drawn.shape == (2000, 6)
    assert -1 <= float(drawn.min()) < -0.99 < 0.99 < float(drawn.max()) <= 1
    again = [gan.draw(5, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(gan.draw(5), gan.draw(5))
