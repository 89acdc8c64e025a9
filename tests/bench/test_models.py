import pytest
import torch
from torch import nn

from normkit.bench.case import Effort
from normkit.bench.memory_case import PeakMemoryCase, SavedBytesCase, peak_bytes, saved_bytes
from normkit.bench.model_case import ModelCase
from normkit.bench.models import fused, inception, resnet18, separate

TINY = Effort(rounds=2, model_rounds=2, compiles=False)
NORMS = {"ours": fused("relu"), "eager": separate(nn.ReLU(inplace=True))}
MEGABYTE = 2**20


def small_net(norm):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.Flatten(), nn.LazyLinear(10))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.deep), torch.float64])
@pytest.mark.parametrize("build", [resnet18, inception])
def test_networks_agree_whatever_the_norm(build, dtype):
    ours, theirs = (build(norm, classes=10).to(dtype) for norm in NORMS.values())
    ours.load_state_dict(theirs.state_dict())
    x, target = torch.randn(4, 3, 64, 64, dtype=dtype), torch.randint(10, (4,))
    # In float32 a ReLU's sign may differ where its input is almost zero, and one sign is all of a small gradient.
    output, gradient = (1e-3, 0.1) if dtype == torch.float32 else (1e-9, 1e-6)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected, atol=output, rtol=output)
    for logits in (y, expected):
        nn.functional.cross_entropy(logits, target).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= gradient * b.grad.norm()
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), atol=output, rtol=output)


def test_a_whole_step_is_timed():
    result = ModelCase("models", "small", small_net, NORMS, (2, 3, 8, 8)).measure(TINY)
    assert result.errors == {}
    assert result.rounds == TINY.model_rounds
    assert result.seconds.keys() == {"ours", "eager"}
    assert result.ratios.keys() == {"eager"}


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    x = torch.randn(8, 16, 4, 4, requires_grad=True)
    size = x.untyped_storage().nbytes()
    assert saved_bytes(nn.ReLU(), x) == size
    assert saved_bytes(nn.Sequential(nn.ReLU(), nn.ReLU()), x) == 2 * size
    assert saved_bytes(nn.Conv2d(16, 3, 1, bias=False), x) == size


def test_torchs_bn_and_relu_save_input_and_output():
    case = SavedBytesCase("memory", (64, 8, 16, 16), {"eager": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())})
    result = case.measure(TINY)
    assert result.bytes["eager"] / result.facts["input_bytes"] == pytest.approx(2.0, rel=1e-2)


def test_the_peak_is_the_most_held_at_once():
    before = torch.ones(MEGABYTE // 4)  # was there already, and does not count

    def step():
        a = before + 1
        del a
        b, c = before + 1, before + 1
        del b, c

    assert peak_bytes(step) == pytest.approx(2 * MEGABYTE, rel=1e-3)  # and the number 1, as a tensor


def test_memory_of_a_step_is_counted_for_each_who_can_run():
    def missing(channels, *, activated=True):
        raise TypeError("no such norm")

    norms = {"ours": missing, "eager": separate(nn.LeakyReLU())}
    result = PeakMemoryCase("memory", "peak", small_net, norms, (2, 3, 8, 8)).measure(TINY)
    assert result.errors == {"ours": "TypeError: no such norm"}
    assert result.bytes["eager"] > 0
