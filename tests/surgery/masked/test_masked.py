"""nk.masked: what norms are given, what is left afterwards, and what is refused."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.case import randomize_
from support.cases import CASES
from support.sequence_models import valid_positions

LENGTHS = torch.tensor([9, 4, 2, 7])
MASK = valid_positions(LENGTHS, 9)


def x(channels=6, dtype=torch.float64):
    return torch.randn(4, channels, 9, dtype=dtype) * 2 + 1


def net():
    layers = [nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nk.GroupNorm(2, 6, activation="relu")]
    layers += [nn.Conv1d(6, 4, 3, stride=2), nn.InstanceNorm1d(4, affine=True), nk.BatchNorm1d(4)]
    return randomize_(nn.Sequential(*layers)).double()


def state(model):
    """All that a model is: its attributes, those of its layers and how often its tensors were written."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return [
        (
            type(layer),
            sorted(vars(layer)),
            [list(getattr(layer, name)) for name in (*hooks, "_forward_pre_hooks_with_kwargs")],
            [id(t) for t in (*layer._parameters.values(), *layer._buffers.values())],
        )
        for layer in model.modules()
    ]


# ---- what norms are given --------------------------------------------------------------------------------------------

TAKING = [case for case in CASES if getattr(case.build(), "_takes_mask", False) and len(case.shape) > 2]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", TAKING, ids=str)
def test_every_norm_of_ours_that_takes_a_mask_gets_it(case, training):
    layer, given = case.layer(torch.float64, training), case.input(torch.float64)
    if isinstance(layer, nk.layers.DomainBatchNorm2d | nk.layers.DomainBatchNorm1d):
        layer.domain = 0
    twin = copy.deepcopy(layer)
    mask = torch.rand(given.shape[0], *given.shape[2:]) < 0.7
    mask[:2] = True  # two values of every statistic, at least
    with nk.masked(layer, mask):
        y = layer(given)
    assert torch.equal(y, twin(given, mask=mask))
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_mask_that_the_model_passes_itself_stays():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nk.BatchNorm1d(6).double()

        def forward(self, x):
            return self.norm(x, mask=~MASK)

    model, given = Model(), x()
    with nk.masked(model, MASK):
        y = model(given)
    assert torch.equal(y, nk.BatchNorm1d(6).double()(given, mask=~MASK))


BATCH_NORMS = {
    "momentum": {"momentum": 0.3},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "bare": {"affine": False, "momentum": 1.0},
}


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("options", BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_torchs_batch_norm_updates_as_it_would(kind, options):
    """The same as torch's layer with all real positions of the batch in one long example."""
    layer = randomize_(kind(6, **options)).double()
    joined, given = randomize_(nn.BatchNorm1d(6, **options)).double(), x()
    joined.load_state_dict(layer.state_dict())
    for _ in range(2):
        with nk.masked(layer, MASK):
            y = layer(given)
        expected = joined(given.movedim(1, 2)[MASK].T.unsqueeze(0))
    torch.testing.assert_close(y.movedim(1, 2)[MASK], expected[0].T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.state_dict(), joined.state_dict(), rtol=1e-12, atol=1e-12)
    layer.eval()
    joined.eval()
    with nk.masked(layer, MASK):
        y = layer(given)
    expected = joined(given.movedim(1, 2)[MASK].T.unsqueeze(0))
    torch.testing.assert_close(y.movedim(1, 2)[MASK], expected[0].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_torchs_instance_norm_averages_what_its_examples_are(momentum):
    layer = nn.InstanceNorm1d(6, affine=True, track_running_stats=True, momentum=momentum).double()
    given, twin = x(), copy.deepcopy(randomize_(layer))
    with nk.masked(layer, MASK):
        y = layer(given)
    ends = [given[i : i + 1, :, :n] for i, n in enumerate(LENGTHS)]
    for i, one in enumerate(ends):
        own = F.instance_norm(one, weight=twin.weight, bias=twin.bias, eps=twin.eps)
        torch.testing.assert_close(y[i : i + 1, :, : LENGTHS[i]], own, rtol=1e-10, atol=1e-10)
    new, old = (torch.stack([one.mean(2)[0] for one in ends]).mean(0), twin.running_mean)
    torch.testing.assert_close(layer.running_mean, old + (momentum or 0) * (new - old), rtol=1e-12, atol=1e-12)
    new, old = (torch.stack([one.var(2)[0] for one in ends]).mean(0), twin.running_var)
    torch.testing.assert_close(layer.running_var, old + (momentum or 0) * (new - old), rtol=1e-12, atol=1e-12)


def test_norms_of_others_that_call_torchs_functions():
    class NormAct(nn.BatchNorm1d):
        def forward(self, x):
            mean, var = self.running_mean, self.running_var
            return F.relu(F.batch_norm(x, mean, var, self.weight, self.bias, True, 0.2, self.eps))

    layer, given = randomize_(NormAct(6)).double(), x()
    ours = nk.BatchNorm1d(6, momentum=0.2, activation="relu").double()
    ours.load_state_dict(layer.state_dict())
    with nk.masked(layer, MASK):
        y = layer(given)
    torch.testing.assert_close(y, ours(given, mask=MASK), rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.running_var, ours.running_var)


def test_values_without_positions_all_count():
    model = randomize_(nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten())).double()
    model.append(nn.BatchNorm1d(6).double())
    twin, given = copy.deepcopy(model), x(3)
    with nk.masked(model, MASK):
        y = model(given)
    means = [twin[1](twin[0](given[i : i + 1, :, :n])) for i, n in enumerate(LENGTHS)]
    torch.testing.assert_close(y, twin[3](twin[2](torch.cat(means))), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(4, 9), (4, 9, 1), (9, 4, 2)], ids=str)
def test_inputs_of_any_layout(shape):
    """Numbers of tokens, channels last, and the batch second."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)

        def forward(self, *, tokens):
            batch_first = tokens.movedim(tokens.shape.index(4), 0).reshape(4, 9, -1)[..., 0]
            return self.norm(self.embed(batch_first).transpose(1, 2))

    model, tokens = Model(), torch.randint(11, shape)
    with nk.masked(model, MASK.int()):
        y = model(tokens=tokens)
    inputs = []
    model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.eval()(tokens=tokens)
    torch.testing.assert_close(y, nk.BatchNorm1d(6)(inputs[0], mask=MASK))


# ---- what is left afterwards -----------------------------------------------------------------------------------------


def test_nothing_is_left_of_it():
    model = net()
    before, tensors = state(model), {name: t.clone() for name, t in model.state_dict().items()}
    with nk.masked(model, MASK):
        pass
    assert state(model) == before
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    twin, given = copy.deepcopy(model), x(3)
    with nk.masked(model, MASK):
        model(given)
    assert state(model) == before
    model.load_state_dict(twin.state_dict())
    assert torch.equal(model(given), twin(given))


@pytest.mark.parametrize("where", ["before", "inside", "after", "model"])
def test_errors_leave_nothing_either(where):
    model = net()
    before = state(model)

    def fail(*_):
        raise ZeroDivisionError

    handle = {
        "before": lambda: model[1].register_forward_pre_hook(fail),
        "inside": lambda: model[2].register_forward_pre_hook(lambda _, given: (given[0][:, :3],)),
        "after": lambda: model[3].register_forward_hook(fail),
        "model": lambda: model.register_forward_pre_hook(fail),
    }[where]()
    with nk.masked(model, MASK):
        with pytest.raises((ZeroDivisionError, nk.ShapeError)):
            model(x(3))
        assert torch.overrides._get_current_function_mode() is None
        handle.remove()
        good = model(x(3))  # the block goes on
    assert good.isfinite().all()
    assert state(model) == before


def test_an_interrupt_leaves_nothing_either():
    model = net()
    model[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), nk.masked(model, MASK):
        model(x(3))
    assert torch.overrides._get_current_function_mode() is None


def test_parts_of_a_model_may_have_each_their_own_mask():
    first, second = net(), net()
    other = torch.tensor([3, 9, 8, 5])
    twins, given = (copy.deepcopy(first), copy.deepcopy(second)), (x(3), x(3))
    with nk.masked(first, MASK), nk.masked(second, lengths=other):
        results = first(given[0]), second(given[1])
    with nk.masked(twins[0], MASK):
        assert torch.equal(twins[0](given[0]), results[0])
    with nk.masked(twins[1], lengths=other):
        assert torch.equal(twins[1](given[1]), results[1])


def test_the_same_layer_twice_is_an_error():
    model = net()
    for outer, inner in [(model, model), (model, model[1]), (model[1], model)]:
        with (
            nk.masked(outer, MASK),
            pytest.raises(nk.ArgumentError, match="masked already"),
            nk.masked(inner, MASK),
        ):
            pass
    with nk.masked(model, MASK):  # and it is free again
        model(x(3))


def test_threads_at_the_same_time():
    model, given = net().eval(), [x(3) for _ in range(4)]
    with nk.masked(model, MASK):
        expected = [model(one) for one in given]
        found = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: [model(given[i]) for _ in range(5)]}))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(one, expected[i]) for i in range(4) for one in found[i])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_the_block(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for part in self:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    model = Checkpointed(net(), randomize_(nn.Sequential(nn.Conv1d(4, 4, 3), nk.BatchNorm1d(4))).double())
    plain, given = nn.Sequential(*copy.deepcopy(list(model))), x(3).requires_grad_()
    with nk.masked(model, MASK):
        y = model(given)
        y.square().sum().backward()
    with nk.masked(plain, MASK):
        z = plain(given.detach())
        z.square().sum().backward()
    torch.testing.assert_close(y, z)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_compiled_models_run_uncompiled_inside():
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model, given = net().eval(), x(3)
    compiled = torch.compile(model, backend=backend)
    compiled(given)
    many = len(compilations)
    with nk.masked(model, MASK):
        expected = model(given)
    with nk.masked(compiled, MASK):
        assert torch.equal(compiled(given), expected)
    compiled(given)
    assert len(compilations) == many > 0


def test_half_precision_and_autocast():
    model, given = net().float(), x(3, torch.float32)
    twin = copy.deepcopy(model)
    with nk.masked(model, MASK), torch.autocast("cpu", torch.bfloat16):
        y = model(given)
    with nk.masked(twin, MASK):
        expected = twin(given)
    valid = valid_positions((LENGTHS - 3) // 2 + 1, 4)[:, None]
    assert ((y.float() - expected) * valid).abs().max() < 0.1 * expected.abs().max()
    with nk.masked(model.bfloat16(), MASK):
        assert model(given.bfloat16()).dtype is torch.bfloat16


# ---- what is refused -------------------------------------------------------------------------------------------------

BAD = {
    "neither": ({}, nk.ArgumentError, "or lengths=; got neither"),
    "both": ({"mask": MASK, "lengths": LENGTHS}, nk.ArgumentError, "or lengths=; got both"),
    "list": ({"mask": MASK.tolist()}, nk.ArgumentError, "a mask that is a tensor; got a list"),
    "float": ({"mask": MASK.float()}, nk.errors.DtypeError, "boolean mask, true where .* got torch.float32"),
    "vector": ({"mask": LENGTHS}, nk.ShapeError, r"\(N, L\).*got \(4,\)\. Numbers of positions go into lengths="),
    "empty": ({"mask": MASK[:0]}, nk.ShapeError, r"got \(0, 9\)"),
    "fractions": ({"lengths": LENGTHS / 9}, nk.errors.DtypeError, "whole numbers.*got torch.float32"),
    "texts": ({"lengths": ["9", "4"]}, nk.errors.DtypeError, "whole numbers.*got a list"),
    "matrix": ({"lengths": LENGTHS[None]}, nk.ShapeError, r"shape \(N,\).*got \(1, 4\)"),
    "negative": ({"lengths": [9, 4, -1, 7]}, nk.ArgumentError, "not negative; got -1"),
    "dim": ({"mask": MASK, "dim": 2}, nk.ArgumentError, r"dim= counted from the end.*got 2"),
    "to_length": ({"mask": MASK, "to_length": 3}, nk.ArgumentError, r"\(mask, length\) -> mask; got a int"),
}


@pytest.mark.parametrize(("given", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(given, error, message):
    model = net()
    before = state(model)
    with pytest.raises(error, match=message), nk.masked(model, **given):
        pass
    assert state(model) == before


def test_bad_models():
    with pytest.raises(nk.ArgumentError, match=r"needs a torch\.nn\.Module; got a list"), nk.masked([], MASK):
        pass
    without = nn.Sequential(nn.Conv1d(3, 4, 3), nn.LayerNorm(7))
    with pytest.raises(nk.ArgumentError, match="no norm in this Sequential"), nk.masked(without, MASK):
        pass
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(nk.ArgumentError, match="scripted Sequential"), nk.masked(scripted, MASK):
        pass


MISFITS = {
    "length": ({"mask": MASK[:, :8]}, (4, 3, 9), r"for 4 examples of length 8, .* \(4, 3, 9\)"),
    "batch": ({"mask": MASK}, (5, 3, 9), r"for 4 examples of length 9, .* \(5, 3, 9\)"),
    "batch-of-lengths": ({"lengths": LENGTHS}, (5, 3, 9), r"lengths for 4 examples, .*a batch of 5"),
    "too-long": ({"lengths": LENGTHS}, (4, 3, 8), r"lengths up to 9, .*dimension -1 has 8\. .*dim="),
    "other-dimension": ({"lengths": LENGTHS}, (4, 9, 12), r"lengths up to 9, .*dimension -1 has 12\. .*dim="),
    "vector": ({"mask": MASK}, (4,), "got no tensor that has both"),
}


@pytest.mark.parametrize(("given", "shape", "message"), MISFITS.values(), ids=MISFITS)
def test_inputs_that_the_mask_is_not_of(given, shape, message):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with nk.masked(model, **given), pytest.raises(nk.ShapeError, match=message):
        model(torch.randn(shape).double())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class Stacked(nn.Module):
    """Frames joined in pairs by a view, which no operator tells the length of."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(12)

    def stack(self, x):
        h = self.first(x).transpose(1, 2)
        return h[:, :8].reshape(len(h), 4, 12).transpose(1, 2)

    def forward(self, x):
        return self.norm(self.stack(x))


def test_a_length_that_is_not_known_is_refused_unless_the_caller_knows():
    model, given, asked = randomize_(Stacked()).double(), x(3), []
    message = r"norm \(BatchNorm1d\) was given \(4, 12, 4\), a length of 4, .* has length 9, from which no other"
    with nk.masked(model, MASK), pytest.raises(nk.ShapeError, match=message):
        model(given)
    halves, ours = valid_positions(LENGTHS // 2, 4), nk.BatchNorm1d(12).double()
    ours.load_state_dict(model.norm.state_dict())

    def to_length(mask, length):
        asked.append((mask, length))
        return halves

    with nk.masked(model, MASK, to_length=to_length):
        y = model(given)
    ((mask, length),) = asked
    assert torch.equal(mask, MASK)
    assert length == 4
    expected = ours(model.stack(given * MASK[:, None]), mask=halves)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.norm.state_dict(), ours.state_dict(), rtol=1e-12, atol=1e-12)


def test_none_leaves_a_length_alone_and_other_answers_are_checked():
    model, given = randomize_(Stacked()).double().eval(), x(3)
    model.norm.track_running_stats, model.norm.running_mean, model.norm.running_var = False, None, None
    plain = copy.deepcopy(model)
    given = given * MASK[:, None]
    with nk.masked(model, MASK, to_length=lambda mask, length: None):
        assert torch.equal(model(given), plain(given))
    for answer, error, message in [
        (MASK, nk.ShapeError, r"to_length needs to return a mask of shape \(4, 4\); got \(4, 9\)"),
        (MASK[:, :4].float(), nk.errors.DtypeError, "to_length needs to return a boolean mask.*got torch.float32"),
        (3, nk.errors.DtypeError, "got a int"),
    ]:
        with (
            nk.masked(model, MASK, to_length=lambda mask, length, answer=answer: answer),
            pytest.raises(error, match=message),
        ):
            model(given)


class Folded(nn.Module):
    """Frames as examples."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):  # (N, C, L)
        return self.norm(x.transpose(1, 2).flatten(0, 1))


def test_frames_that_are_examples():
    message = r"norm \(BatchNorm1d\) was given \(36, 6\), a batch of 36; the mask is for a batch of 4"
    model = Folded(nn.BatchNorm1d(6)).double()
    with nk.masked(model, MASK), pytest.raises(nk.ShapeError, match=message):
        model(x())
    for fine in (Folded(nn.BatchNorm1d(6)).eval(), Folded(nn.GroupNorm(2, 6))):  # which need no mask
        model, given = randomize_(fine).double(), x()
        expected = model(given)
        with nk.masked(model, MASK):
            assert torch.equal(model(given), expected)


def test_lengths_of_other_inputs_are_not_taken_for_known():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

        def forward(self, x, y):
            return self.norm(x).sum() + self.other(y[..., 1:]).sum()

    model = Two().double()
    message = r"other \(BatchNorm1d\) .* not computed from an input that the mask is of"
    with nk.masked(model, MASK), pytest.raises(nk.ShapeError, match=message):
        model(x(), torch.randn(4, 6, 10).double())


def test_norms_that_take_no_mask():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return (x - x.mean((0, 2), keepdim=True)) * self.weight[:, None]

    maps = torch.ones(4, 9, 9, dtype=torch.bool)
    for layer, mask, message in [
        (nk.SwitchableNorm2d(6), maps, "takes statistics of positions and no mask"),
        (nk.FilterResponseNorm2d(6), maps, r"1 \(FilterResponseNorm2d\) takes"),
        (Own(6), MASK, r"1 \(Own\) computes its statistics by other means"),
    ]:
        model = nn.Sequential(nn.Identity(), layer).double()
        given = torch.randn(4, 6, *mask.shape[1:]).double()
        with nk.masked(model, mask), pytest.raises(nk.UnsupportedError, match=message):
            model(given)
    frozen, given = nn.Sequential(nk.freeze(nn.BatchNorm1d(6)).model).double(), x()
    expected = frozen(given)
    with nk.masked(frozen, MASK):  # whose statistics are not of any positions
        assert torch.equal(frozen(given), expected)


def test_a_layer_that_is_called_by_itself():
    model = net()
    with nk.masked(model, MASK), pytest.raises(nk.UnsupportedError, match=r"1 \(BatchNorm1d\) was called by itself"):
        model[1](x())
    replica = model._replicate_for_data_parallel()  # what DataParallel runs in a thread of its own
    with nk.masked(model, MASK), pytest.raises(nk.UnsupportedError, match="or in another thread than the model"):
        replica(x(3))
