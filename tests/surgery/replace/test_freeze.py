"""A frozen norm stands still whatever is done to the model, and an unfrozen one is what it was."""

import copy
import io
import pickle

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import normkit as nk
from normkit.surgery.replace.convert import convert
from normkit.surgery.replace.freeze import freeze, unfreeze
from support.case import randomize_
from support.foreign_norms import (
    BatchNormAct2d,
    FrozenBatchNorm2d,
    HiddenActivation,
    LlamaStyleRMSNorm,
    Scattered,
    picture,
    randomized,
    same_picture,
)

KINDS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nk.BatchNorm2d: 2, nk.BatchRenorm3d: 3}


def net():
    """Norms of every sort, some switched to evaluation, some parameters without gradients."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.BatchNorm2d(8, eps=0.01, momentum=0.3),
        nn.ReLU(),
        nk.BatchNorm2d(8, momentum=None, activation="silu", affine="scale"),
        BatchNormAct2d(8, nn.ReLU(), momentum=0.2),
        nk.GhostBatchNorm2d(8, chunk_size=2, eps=0.002),
        nn.Flatten(),
        nn.Linear(72, 6),
        nn.BatchNorm1d(6, affine=False),
    )
    randomized(model)
    model[3].eval()
    return model


X = torch.randn(6, 3, 3, 3)
NORMS = ["1", "3", "4", "5", "8"]


def tensors_of(model, names=NORMS):
    return {f"{n}.{k}": t.clone() for n in names for k, t in model.get_submodule(n).state_dict().items()}


def assert_equal(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("inplace", [False, True])
def test_evaluation_and_state_are_what_they_were(affine, inplace):
    model = net()
    state = copy.deepcopy(model.state_dict())
    done = freeze(model, affine=affine, example=X, inplace=inplace)
    assert [change.layer for change in done.changed] == NORMS
    assert done.parity.max_rel < 1e-6
    assert done.parity.first_layer is None
    assert_equal(done.model.state_dict(), state)
    frozen = done.model[3]
    assert type(frozen) is nk.FrozenBatchNorm2d
    assert (frozen.eps, frozen.momentum, frozen.activation, frozen.training) == (1e-5, None, "silu", False)
    expected = done.model.eval()(X)
    done.model.train()
    torch.testing.assert_close(done.model(X), expected, rtol=0, atol=0)  # training is evaluation now


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("affine", [True, False])
def test_a_hundred_steps_move_nothing(kind, affine):
    """By an optimizer that was made before, and has momentum already; with train() in between."""
    model = net().requires_grad_()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step():
        optimizer.zero_grad()
        model.train()
        model(torch.randn(6, 3, 3, 3)).square().mean().backward()
        optimizer.step()

    step()
    freeze(model, affine=affine, inplace=True)
    before, weight = tensors_of(model), model[0].weight.clone()
    for _ in range(100):
        step()
        model.eval()
        model.train()
    after = tensors_of(model)
    moved = {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])}
    assert moved == (set() if affine else {"weight", "bias"})
    assert not torch.equal(model[0].weight, weight)


def test_without_the_affine_gamma_and_beta_are_the_same_parameters():
    model = net()
    before = dict(model.named_parameters())
    freeze(model, affine=False, inplace=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    twin = net()
    twin.load_state_dict(model.state_dict())
    expected = torch.autograd.grad(twin.eval()(X).square().sum(), twin[1].weight)
    found = torch.autograd.grad(model.train()(X).square().sum(), model[1].weight)
    torch.testing.assert_close(found, expected)


def test_freezing_the_rest_later():
    model = freeze(net(), affine=False).model
    done = freeze(model)
    assert [change.layer for change in done.changed] == NORMS[:4]
    assert done.skipped[-1] == ("8", "FrozenBatchNorm1d", "is frozen already")
    assert list(done.model[1].parameters()) == []
    back = unfreeze(done.model).model
    assert type(back[1]) is nn.BatchNorm2d
    assert_equal(back.state_dict(), model.state_dict())
    assert {s.why for s in freeze(done.model, affine=False).skipped} == {"is frozen already"}


@pytest.mark.parametrize("affine", [True, False])
def test_unfreeze_gives_back_the_very_layers(affine):
    """Classes, options, children, parameters and what wants a gradient, and outputs bit for bit."""
    model = net()
    before, expected = picture(model), copy.deepcopy(model).train()(X)
    freeze(model, affine=affine, inplace=True)
    done = unfreeze(model, example=X, inplace=True)
    assert done.parity.max_rel < 1e-6
    assert same_picture(picture(model), before)
    assert torch.equal(model.train()(X), expected)


def test_unfreeze_gives_back_parameters_with_the_frozen_values():
    """Not with what an optimizer did to them in the meantime; the optimizer can be used again afterwards."""
    model = net().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model(X).sum().backward()
    freeze(model, inplace=True)
    before = tensors_of(model)
    optimizer.step()  # with the gradients of before
    unfreeze(model, inplace=True)
    assert_equal(tensors_of(model), before)
    optimizer.zero_grad()
    model.train()(X).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_types_and_options_changed_meanwhile_are_kept():
    model = freeze(net()).model.double()
    model[1].momentum = 0.7
    back = unfreeze(model).model
    assert back[1].weight.dtype == back[1].running_mean.dtype == torch.float64
    assert back[1].momentum == 0.7
    assert back.eval()(X.double()).dtype == torch.float64


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("affine", [True, False])
def test_copies_and_pickles(affine):
    model = net()
    frozen = freeze(model, affine=affine).model
    expected = frozen.train()(X)
    for other in copies(frozen):
        assert torch.equal(other.train()(X), expected)
        assert_equal(other.state_dict(), model.state_dict())
        back = unfreeze(other).model
        assert [type(layer) for layer in back] == [type(layer) for layer in model]
        assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]


def test_state_dicts_go_both_ways():
    one, other = net(), net()
    frozen = freeze(one).model
    frozen.load_state_dict(other.state_dict())
    torch.testing.assert_close(frozen.train()[:2](X), other.eval()[:2](X))
    one.load_state_dict(frozen.state_dict())
    assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("affine", [True, False])
def test_distributed_data_parallel(tmp_path, affine):
    model = freeze(net(), affine=affine).model.requires_grad_()
    before = tensors_of(model)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            parallel.train()(torch.randn(6, 3, 3, 3)).square().mean().backward()
            optimizer.step()
    finally:
        distributed.destroy_process_group()
    after = tensors_of(model)
    moved = {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])}
    assert moved == (set() if affine else {"weight", "bias"})


@pytest.mark.parametrize("verb", [freeze, unfreeze])
def test_undo_gives_back_every_bit(verb):
    model = net()
    model[1].register_forward_hook(lambda *_: None)
    if verb is unfreeze:
        freeze(model, inplace=True)
    before = picture(model)
    done = verb(model, example=X, inplace=True)
    assert done.changed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_().train()(torch.randn(6, 3, 3, 3)).sum().backward()
    optimizer.step()
    assert done.undo() is model
    assert same_picture(picture(model), before)


def test_undo_of_a_copy_is_the_model_itself():
    model = net()
    before = picture(model)
    assert freeze(model).undo() is model
    assert same_picture(picture(model), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_root_itself(kind, inplace):
    layer = randomized(kind(5, eps=0.02, momentum=0.4))
    x = torch.randn((4, 5, 3, 2, 4)[: KINDS[kind] + 2])
    done = freeze(layer, example=x, inplace=inplace)
    assert type(done.model).__name__ == f"FrozenBatchNorm{KINDS[kind]}d"
    assert (done.model is layer) == inplace
    assert done.changed[0].layer == ""
    back = unfreeze(done.model).model
    assert type(back) is kind
    assert (back.eps, back.momentum) == (0.02, 0.4)


def test_wherever_the_layers_are():
    model = randomized(Scattered())
    done = freeze(model, example=torch.randn(4, 4, 3, 3))
    assert [type(layer) for layer in done.model.every_norm()] == [nk.FrozenBatchNorm2d] * 5
    assert done.model.again is done.model.shared
    assert done.parity.max_rel < 1e-5
    back = unfreeze(done.model).model
    assert [layer.momentum for layer in back.every_norm()] == [0.3, 0.1, 0.1, 0.1, None]


def test_convert_is_the_same_surgery():
    model = net()
    one, other = freeze(model).model, convert(model, "frozen").model
    assert_equal(one.state_dict(), other.state_dict())
    assert [type(layer) for layer in one] == [type(layer) for layer in other]
    assert [type(layer) for layer in unfreeze(other).model] == [type(layer) for layer in model]


def test_window_of_an_accumulated_norm_comes_back():
    layer = randomize_(nk.AccumulatedBatchNorm2d(4, micro_batches=2))
    layer(torch.randn(3, 4, 2, 2))
    back = unfreeze(freeze(layer).model).model
    x = torch.randn(3, 4, 2, 2)
    assert torch.equal(back(x), layer(x))


def test_a_sync_batch_norm_is_frozen_with_an_example_and_comes_back():
    layer = randomize_(nn.SyncBatchNorm(8))
    assert "pass example=" in freeze(layer).skipped[0].why
    done = freeze(layer, example=torch.randn(2, 8, 3, 3))
    assert type(done.model) is nk.FrozenBatchNorm2d
    assert type(unfreeze(done.model).model) is nn.SyncBatchNorm
    synced = convert(nn.BatchNorm3d(4), "sync", classes="torch").model
    assert type(freeze(synced).model) is nk.FrozenBatchNorm3d
    assert type(convert(unfreeze(freeze(synced).model).model, "batch").model) is nk.BatchNorm3d


def test_frozen_norms_of_others_are_thawed_into_ours():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), FrozenBatchNorm2d(8, 0.1))
    assert freeze(model).skipped[0].why == "is frozen already"
    done = unfreeze(model, example=torch.randn(2, 3, 4, 4))
    assert type(done.model[1]) is nk.BatchNorm2d
    assert done.parity.max_rel < 1e-6
    assert done.model[1].weight.requires_grad


def test_our_own_frozen_layers_are_thawed():
    layer = randomize_(nk.FrozenBatchNorm2d(5, eps=0.1, momentum=0.6, activation="relu"))
    new = unfreeze(layer).model
    assert type(new) is nk.BatchNorm2d
    assert (new.eps, new.momentum, new.activation) == (0.1, 0.6, "relu")
    assert_equal(new.state_dict(), layer.state_dict())


def test_a_layer_whose_gamma_learns_can_be_reset():
    layer = freeze(randomize_(nn.BatchNorm2d(4)), affine=False).model
    layer.reset_parameters()
    assert layer.weight.tolist() == [1.0] * 4
    assert layer.weight.requires_grad


def test_what_is_skipped_and_why():
    model = nn.Sequential(
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        HiddenActivation(4),
        LlamaStyleRMSNorm(4),
        nk.PositionBatchNorm2d(4, 2, 2),
        nk.DomainBatchNorm2d(4, 2),
        nn.BatchNorm2d(4),
    )
    done = freeze(model)
    reasons = {skipped.layer: skipped.why for skipped in done.skipped}
    assert reasons["0"] == "it stores no statistics to freeze"
    assert reasons["1"] == "it stores no statistics"
    assert reasons["2"] == "only batch norms freeze"
    assert "HiddenActivation adds behaviour" in reasons["3"]
    assert reasons["4"] == "is not a norm we know"
    assert reasons["5"] == "it has statistics of its own for every position"
    assert reasons["6"] == "only batch norms freeze"
    assert [change.layer for change in done.changed] == ["7"]
    assert "warning: no batch has ever updated its statistics" in done.changed[0].why


def test_bad_input():
    model = net()
    before = picture(model)
    with pytest.raises(nk.NormkitError, match="does not run on the example"):
        freeze(model, example=torch.randn(2, 5, 3, 3), inplace=True)
    with pytest.raises(nk.ArgumentError, match=r"must be a torch.nn.Module; got a str"):
        unfreeze("model")
    assert same_picture(picture(model), before)


@pytest.mark.parametrize("act", [nn.ReLU6(inplace=True), nn.Hardswish(), nn.PReLU(8), nn.LeakyReLU(0.3)], ids=str)
def test_any_activation_inside_goes_along(act):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), BatchNormAct2d(8, copy.deepcopy(act)))
    randomized(model)
    before = picture(model)
    frozen = freeze(model, example=X, inplace=True)
    assert frozen.skipped == []
    assert frozen.parity.max_rel < 1e-6
    assert type(model[1]) is nk.FrozenBatchNorm2d
    assert [type(p) for p in model[1].parameters()] == [type(p) for p in act.parameters()]  # an activation still learns
    assert "frozen already" in freeze(model).skipped[0].why
    unfreeze(model, inplace=True)
    assert type(model[1]) is BatchNormAct2d
    assert same_picture(picture(model), before)
