"""Inside no_updates a forward in training mode writes nothing, and computes what it always does."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.surgery.no_updates import no_updates
from support.case import randomize_
from support.cases import CASES


def net():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nk.BatchNorm2d(4, activation="relu", momentum=None)]
    layers += [nn.InstanceNorm2d(4, track_running_stats=True), nk.BatchRenorm2d(4), nn.Flatten(), nn.Linear(64, 2)]
    return randomize_(nn.Sequential(*layers)).train()


def x():
    return torch.randn(5, 3, 6, 6) * 2 + 1


def buffers(model):
    return {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}


def assert_untouched(model, before):
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    for name, (buffer, value, version) in before.items():
        assert after[name] is buffer, name
        assert torch.equal(buffer, value), name
        assert buffer._version == version, name


def hooks(model):
    return [
        (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._forward_hooks_always_called)) for m in model.modules()
    ]


STORING = [case for case in CASES if any(True for _ in case.build().buffers())]


@pytest.mark.parametrize("case", STORING, ids=str)
def test_no_layer_of_ours_writes_and_all_compute_the_same(case):
    layer = case.layer()
    if isinstance(layer, nk.layers.DomainBatchNorm2d | nk.layers.DomainBatchNorm1d):
        layer.domain = 0
    twin, given = copy.deepcopy(layer), case.input()
    before = buffers(layer)
    with no_updates(layer):
        first, second = layer(given), layer(given)
    assert_untouched(layer, before)
    assert torch.equal(first, twin(given))
    assert torch.equal(second, first)


def test_outputs_and_gradients_are_those_of_training():
    model, given = net(), x()
    twin = copy.deepcopy(model)
    before = buffers(model)
    with no_updates(model):
        y = model(given)
    y.square().sum().backward()  # after the block
    z = twin(given)
    z.square().sum().backward()
    assert torch.equal(y, z)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert_untouched(model, before)
    assert not torch.equal(twin[1].running_mean, model[1].running_mean)


def test_a_backward_that_is_pending_goes_on():
    model = net()
    y = model(x())
    with no_updates(model):
        model(x())
    y.sum().backward()


def test_nested_shared_and_gone_afterwards():
    model = net()
    model.append(model[1])  # shared
    with torch.no_grad():
        model[5], model[6] = nn.Identity(), nn.Identity()
    before, hooked = buffers(model), hooks(model)
    with no_updates(model):
        with no_updates(model[1]), no_updates(model):
            model(x())
        assert_untouched(model, before)
        model(x())
    assert_untouched(model, before)
    assert hooks(model) == hooked
    model(x())
    assert not torch.equal(model[1].running_mean, before["1.running_mean"][1])


def test_evaluation_inside_uses_what_is_stored():
    model, given = net(), x()
    expected = copy.deepcopy(model).eval()(given)
    with no_updates(model):
        model(given)
        assert torch.equal(model.eval()(given), expected)


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_errors_leave_everything_in_place(where):
    model = net()

    def fail(*_):
        raise ZeroDivisionError

    handle = {
        "before": lambda: model[1].register_forward_pre_hook(fail),
        "inside": lambda: model[2].register_forward_pre_hook(lambda _, given: (given[0][:, :3],)),
        "after": lambda: model[1].register_forward_hook(fail),
    }[where]()
    before, hooked = buffers(model), hooks(model)
    with pytest.raises((ZeroDivisionError, nk.ShapeError)), no_updates(model):
        model(x())
    assert_untouched(model, before)
    assert hooks(model) == hooked
    handle.remove()
    with no_updates(model):
        model(x())
    assert_untouched(model, before)


def test_hooks_of_others_see_the_statistics_that_stay():
    model, seen = net(), []
    model[1].register_forward_hook(lambda layer, *_: seen.append(layer.running_mean))
    with no_updates(model):
        model[1].register_forward_hook(lambda layer, *_: seen.append(layer.running_mean))
        model(x())
    assert [one is model[1].running_mean for one in seen] == [True, True]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_layers_that_are_initialized_inside():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with no_updates(model):
        model(torch.randn(4, 3))
    assert int(model[0].num_batches_tracked) == 0
    assert torch.equal(model[0].running_mean, torch.zeros(3))


def test_a_hook_before_ours_that_fails_takes_nothing_back():
    model = net()
    with no_updates(model):
        handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        before = buffers(model)
        with pytest.raises(ZeroDivisionError):
            model(x())
        handle.remove()
        model(x())
        assert_untouched(model, before)


def test_checkpointing_inside_the_block_repeats_without_a_trace():
    model, given = net(), x()
    before = buffers(model)
    with no_updates(model):
        y = checkpoint(model, given, use_reentrant=False)
        y.sum().backward()
    assert_untouched(model, before)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(given).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_threads_at_the_same_time():
    model = net()
    before = buffers(model)
    given = [x() for _ in range(4)]
    with no_updates(model):
        threads = [threading.Thread(target=lambda one=one: [model(one) for _ in range(30)]) for one in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_untouched(model, before)


def test_foreign_norms_and_those_in_lists():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))

        def forward(self, x):
            self.running_mean += x.mean((0, 2, 3))
            return x - self.running_mean.view(1, -1, 1, 1)

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [Theirs(), nn.BatchNorm2d(3)]

        def forward(self, x):
            return self.held[1](self.held[0](x))

    model = Holder()
    with no_updates(model):
        model(x())
    assert model.held[0].running_mean.abs().max() == 0
    assert int(model.held[1].num_batches_tracked) == 0
    model(x())
    assert int(model.held[1].num_batches_tracked) == 1


def test_buffers_of_other_layers_are_theirs():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            return x

    model = nn.Sequential(Counter(), nn.BatchNorm2d(3))
    with no_updates(model):
        model(x())
    assert (int(model[0].calls), int(model[1].num_batches_tracked)) == (1, 0)


def test_compiled_code_writes_nothing_and_stays_compiled():
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(model, backend=backend)
    given = torch.randn(6, 3)
    compiled(given)
    before = buffers(model)
    with no_updates(compiled):
        compiled(given)
    assert_untouched(model, before)
    compiled(given)
    assert int(model[1].num_batches_tracked) == 2
    assert len(compilations) == 1


def test_a_function_compiled_inside_is_free_afterwards():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    run = torch.compile(lambda given: model(given) * 2, backend="eager")
    given = torch.randn(6, 3)
    with no_updates(model):
        run(given)
    assert int(model[1].num_batches_tracked) == 0
    run(given)
    assert int(model[1].num_batches_tracked) == 1


def test_what_cannot_be_reached_is_an_error():
    with pytest.raises(nk.ArgumentError, match=r"needs a torch\.nn\.Module; got a list"), no_updates([]):
        pass
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(nk.ArgumentError, match="scripted BatchNorm1d"), no_updates(scripted):
        pass


def test_blocks_that_end_in_another_order_leave_compiled_code_compiled():
    calls = []

    def counted(graph, _):
        def run(*args):
            calls.append(len(args))
            return graph.forward(*args)

        return run

    torch.compiler.reset()
    compiled = torch.compile(nn.Linear(3, 3), backend=counted)
    compiled(torch.randn(2, 3))
    blocks = [nk.no_updates(nn.BatchNorm1d(3)) for _ in range(2)]
    for block in blocks:
        block.__enter__()
    compiled(torch.randn(2, 3))
    for block in blocks:  # the first to begin is the first to end
        block.__exit__(None, None, None)
    compiled(torch.randn(2, 3))
    assert len(calls) == 2  # all calls but the one inside
    torch.compiler.reset()
