"""The transformer sees nothing of what comes later, and its norms stand where they are said to."""

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab.models.transformer import Residual, TokenBatchNorm, transformer

NORMS = {
    "layer": nk.LayerNorm,
    "rms": nk.RMSNorm,
    "scale": nk.ScaleNorm,
    "batch": TokenBatchNorm,
    "none": None,
}
SMALL = {"alphabet": 7, "length": 12, "width": 8, "blocks": 2, "heads": 2}


def small(norm="layer", placement="pre", seed=3, **options):
    return transformer(NORMS[norm], placement, seed=seed, **(SMALL | options)).double()


def characters(examples=3, length=12):
    return torch.randint(7, (examples, length))


def changed_after(model, at=5):
    """Which positions' logits change when the characters from this position on do."""
    x = characters()
    y = x.clone()
    y[:, at:] = (y[:, at:] + torch.randint(1, 7, y[:, at:].shape)) % 7
    with torch.no_grad():
        return (model(x) - model(y)).abs().amax((0, 2)) > 1e-9


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_nothing_is_seen_of_what_comes_later(norm, placement):
    model = small(norm, placement)
    if norm == "batch":
        model(characters(16))  # statistics that are not the defaults
    changes = changed_after(model.eval())
    assert changes.tolist() == [False] * 5 + [True] * 7


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_in_training_batch_statistics_alone_show_something_of_it(norm, placement):
    changes = changed_after(small(norm, placement).train())
    assert changes[:5].all() if norm == "batch" else not changes[:5].any()
    assert changes[5:].all()


def residuals(model):
    return [module for module in model.modules() if isinstance(module, Residual)]


def test_pre_norm_leaves_an_identity_from_end_to_end():
    model, seen = small(placement="pre"), []
    for residual in residuals(model):
        nn.init.zeros_(list(residual.branch.parameters())[-2])  # the weight of its last layer
    model.residuals.register_forward_hook(lambda _, inputs, output: seen.extend([*inputs, output]))
    model(characters())
    assert torch.equal(*seen)


@pytest.mark.parametrize("norm", ["layer", "rms", "scale", "batch"])
def test_post_norm_normalizes_every_sum(norm):
    model, seen = small(norm, "post"), []
    for residual in residuals(model):
        residual.register_forward_hook(lambda _, inputs, output: seen.append(output.flatten(0, 1)))
    model(characters(32))
    over = 0 if norm == "batch" else 1
    assert len(seen) == 4
    for output in seen:  # of mean 0, but for those that do not centre, and of mean square 1, but for eps
        assert (output.square().mean(over) - 1).abs().max() < 1e-2
        assert (output.mean(over).abs().max() < 1e-9) == (norm in ("layer", "batch"))


def test_branches_see_normalized_input_with_pre_norm_and_sums_with_post_norm():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for placement, expected in (
        ("pre", lambda block: x + block.branch(block.norm(x))),
        ("post", lambda block: block.norm(x + block.branch(x))),
    ):
        (block, *_) = residuals(small(placement=placement))
        nn.init.normal_(block.norm.weight)
        assert torch.equal(block(x), expected(block))


@pytest.mark.parametrize(("placement", "count"), [("pre", 5), ("post", 4)])
def test_norms_are_counted(placement, count):
    for norm in ("layer", "rms", "scale", "batch"):
        assert sum(isinstance(m, NORMS[norm]) for m in small(norm, placement).modules()) == count


def test_parameters():
    with torch.device("meta"):
        found = {
            (norm, placement): sum(p.numel() for p in transformer(NORMS[norm], placement, alphabet=80).parameters())
            for norm in NORMS
            for placement in ("pre", "post")
        }
    attention, feedforward = 64 * 192 + 192 + 64 * 64 + 64, 64 * 256 + 256 + 256 * 64 + 64
    bare = 80 * 64 + 64 * 64 + 4 * (attention + feedforward) + 64 * 80 + 80
    each = {"layer": 128, "rms": 64, "scale": 1, "batch": 128, "none": 0}
    assert bare == 213_328
    assert found == {(n, p): bare + each[n] * {"pre": 9, "post": 8}[p] for n in NORMS for p in ("pre", "post")}


def test_weights_depend_on_the_seed_alone():
    def weights(norm, placement, seed):
        torch.rand(seed + len(norm))  # whatever was drawn before
        return [p for p in small(norm, placement, seed).parameters() if p.ndim > 1]

    first = weights("layer", "pre", 3)
    assert len(first) == 2 + 2 * 4 + 1
    for norm in NORMS:
        for placement in ("pre", "post"):
            others = weights(norm, placement, 3)
            assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, weights("layer", "pre", 4), strict=True))


def test_characters_and_positions_start_with_a_variance_of_one_each():
    model, seen = transformer(None, alphabet=300, length=300, width=256, blocks=1), []
    model.residuals.register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    with torch.no_grad():
        model(torch.arange(300)[None])
    # A variance of 76,800 normal values is within 3% of 2 but once in 10^8 draws.
    assert seen[0].var().item() == pytest.approx(2.0, rel=0.03)


def test_attention_is_the_mean_of_values_where_nothing_is_preferred():
    attention = residuals(small())[0].branch
    with torch.no_grad():
        attention.inputs.weight[:16] = 0  # queries and keys
        attention.inputs.bias[:16] = 0
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    values = nn.functional.linear(x, attention.inputs.weight[16:], attention.inputs.bias[16:])
    means = values.cumsum(1) / torch.arange(1, 7).view(-1, 1)
    torch.testing.assert_close(attention(x), attention.output(means))


def test_shorter_texts_are_taken_and_longer_ones_refused():
    model = small().eval()
    x = characters()
    with torch.no_grad():
        torch.testing.assert_close(model(x[:, :5]), model(x)[:, :5])
    with pytest.raises(ArgumentError, match="at most 12 characters in a row; got 13"):
        model(characters(length=13))


def test_batch_norm_takes_statistics_over_examples_and_positions():
    norm, x = TokenBatchNorm(8).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    expected = nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"placement": "before"}, '"pre" or "post"; got \'before\''), ({"width": 9}, "multiple of the 2 heads; got 9")],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        small(**options)
