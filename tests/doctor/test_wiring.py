"""Faults in models that are wired by hand: functional norms and dropout, residuals, branches, lists, recurrence."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from support.depth import thinned
from support.patients import Case, cnn, images, mlp, rows, settled


class Net(nn.Module):
    """A forward given as a function of the model and its input."""

    def __init__(self, forward, **layers):
        super().__init__()
        self._wired = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self._wired(self, x)


def conv(**options):
    return nn.Conv2d(3, 6, 3, padding=1, **options)


def bn():
    return nn.BatchNorm2d(6)


BIASES = {
    "a residual by hand": (lambda m, x: F.relu(m.norm(m.conv(x)) + m.skip(x)), {"conv"}),
    "the output is used again": (lambda m, x: m.norm(y := m.conv(x)) + y, set()),
    "the output is returned": (lambda m, x: (m.norm(y := m.conv(x)), y), set()),
    "two norms": (lambda m, x: m.norm(y := m.conv(x)) + m.other(y), {"conv"}),
    "concatenated with something else": (lambda m, x: m.wide(torch.cat([m.conv(x), x], 1)), {"conv"}),
    "pooled in between": (lambda m, x: m.norm(F.adaptive_avg_pool2d(m.conv(x), 2)), {"conv"}),
    "padded in between": (lambda m, x: m.norm(F.pad(m.conv(x), (1, 1, 1, 1))), set()),
    "a ReLU in between": (lambda m, x: m.norm(F.relu(m.conv(x))), set()),
    "flattened": (lambda m, x: m.flat(m.conv(x).flatten(1)), {"conv"}),
    "channels become positions": (lambda m, x: m.rows(m.conv(x).flatten(2).transpose(1, 2)), set()),
    "a layer norm": (lambda m, x: m.layer(m.conv(x)), set()),
    "an instance norm": (lambda m, x: m.instance(m.conv(x)), {"conv"}),
    "a functional norm": (lambda m, x: F.batch_norm(m.conv(x), None, None, training=True), {"conv"}),
    "a functional norm in evaluation": (
        lambda m, x: F.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var),
        set(),
    ),
    "a frozen norm": (lambda m, x: m.frozen(m.conv(x)), set()),
    "dropout in between": (lambda m, x: m.norm(F.dropout(m.conv(x), 0.1, m.training)), set()),
}


ORDINARY = ("a residual by hand", "the output is used again", "concatenated with something else", "a functional norm")


@pytest.mark.parametrize("name", thinned(BIASES, lambda name: name in ORDINARY))
def test_a_bias_is_redundant_where_a_norm_removes_it_and_nothing_else_reads_it(name):
    forward, expected = BIASES[name]
    model = Net(
        forward,
        conv=conv(),
        skip=conv(bias=False),
        norm=bn(),
        other=bn(),
        wide=nn.BatchNorm2d(9),
        flat=nn.BatchNorm1d(6 * 64),
        rows=nn.BatchNorm1d(64),
        layer=nn.GroupNorm(1, 6),
        instance=nn.InstanceNorm2d(6),
        frozen=nk.FrozenBatchNorm2d(6),
    )
    batches = [x for x, _ in images(2)]
    assert Case(settled(model, batches), batches).found("NK301") == expected


def test_a_removed_bias_changes_nothing():
    """What the rule says is true: without the bias it names, training computes the same."""
    forward, _ = BIASES["concatenated with something else"]
    model, x = Net(forward, conv=conv(), wide=nn.BatchNorm2d(9)).train(), images()[0][0]
    with torch.no_grad():
        before = model(x)
        model.conv.bias.zero_()
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class AlwaysTraining(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(True)


def _listed():
    norm = nn.BatchNorm2d(6)
    return Net(lambda m, x: m.hidden[0](m.conv(x)), conv=conv(bias=False), hidden=[norm])


DEPENDENT = {
    "a functional norm": (
        lambda: Net(lambda m, x: F.relu(F.batch_norm(m.conv(x), None, None, training=True)), conv=conv(bias=False)),
        {""},
    ),
    "a functional norm in a block": (
        lambda: nn.Sequential(
            conv(bias=False),
            Net(lambda m, x: F.batch_norm(x, None, None, training=True)),
            nn.Flatten(),
            nn.Linear(384, 2),
        ),
        {"1"},
    ),
    "by hand": (
        lambda: nn.Sequential(
            conv(bias=False),
            Net(lambda m, x: (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)),
            nn.BatchNorm2d(6),
        ),
        {"1"},
    ),
    "in a plain list": (_listed, {"hidden[0]"}),
    "a train() of its own": (lambda: nn.Sequential(conv(bias=False), AlwaysTraining(6)), {"1"}),
    "two without statistics": (
        lambda: cnn(lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
        {"1", "4"},
    ),
}


@pytest.mark.parametrize("name", thinned(DEPENDENT, lambda name: name.startswith(("a functional", "in a"))))
def test_evaluation_that_depends_on_batch_mates_is_found_in_its_layer(name):
    build, layers = DEPENDENT[name]
    batches = [x for x, _ in images(2)]
    assert Case(build(), batches).found("NK201") == layers


def test_attention_over_the_first_dimension_is_no_norm():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # (L, N, C)
    assert Case(layer, [torch.randn(5, 3, 8) for _ in range(2)]).found("NK201") == set()


class Recurrent(nn.Module):
    """A norm in the cell, as used at every step."""

    def __init__(self):
        super().__init__()
        self.read, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for step in range(3):
            h = self.norm(self.read(x) * (1 + step) + h)
        return h


def test_a_norm_in_a_recurrent_cell_is_shared():
    batches = [x for x, _ in rows()]
    (found,) = Case(settled(Recurrent(), batches), batches).examine("NK305").findings
    assert (found.layer, found.severity, found.evidence["calls"]) == ("norm", "warning", 3)


def test_dropout_in_a_forward_is_seen_in_a_block_of_its_own():
    def forward(m, x):
        return m.norm(m.second(m.drop(F.relu(m.first(x)))))

    def build(drop):
        layers = {"first": nn.Linear(6, 32), "second": nn.Linear(32, 32), "norm": nn.BatchNorm1d(32)}
        return settled(Net(forward, drop=drop, **layers), [x for x, _ in rows()])

    (found,) = nk.examine(build(nn.Dropout(0.5)), [x for x, _ in rows()], select="NK303").findings
    assert (found.layer, found.evidence["dropout"], found.severity) == ("norm", ["drop"], "info")
    assert nk.examine(build(nn.Identity()), [x for x, _ in rows()], select="NK303").findings == []


@pytest.mark.parametrize("names", [("conv", "norm"), ("norm",)])
def test_a_norm_is_frozen_with_the_weights_before_it(names):
    """Statistics must move as long as the weights before them do."""
    model = settled(cnn(), images()).train()
    frozen = {"conv": model[0], "norm": model[1]}
    for name in names:
        frozen[name].requires_grad_(False)
    expected = {"1"} if "conv" in names else set()
    assert Case(model, images()).found("NK202") == expected


def test_what_the_optimizer_does_not_have_is_frozen():
    model = settled(cnn(), images()).train()
    optimizer = torch.optim.SGD(model[8].parameters(), lr=0.1)
    assert Case(model, images(), options={"optimizer": optimizer}).found("NK202") == {"1", "4"}


def test_a_frozen_backbone_under_a_head_that_trains_is_no_fault():
    model = settled(cnn(), images()).train()
    model[:3].requires_grad_(False).eval()
    assert nk.examine(model, images(), F.cross_entropy).findings == []


def test_a_layer_frozen_at_its_initialization_is_found():
    model = settled(cnn(), images())
    model[1] = nk.FrozenBatchNorm2d(8)
    assert Case(model, images()).found("NK203") == {"1"}


def test_a_zero_gamma_behind_a_relu_with_its_beta_is_dead():
    model = settled(cnn(), images())
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = 0, -0.1
    (found,) = Case(model, images(), options={"loss": F.cross_entropy}).examine("NK306").findings
    assert (found.layer, found.evidence["channels"]) == ("1", 3)


def test_zero_gammas_of_a_domain_that_no_batch_came_from_are_not_judged():
    model = settled(cnn(), images())
    model = nk.convert(model, "domain", num_domains=2, affine_per_domain=True, only="1").model
    model[1].domain = 0
    with torch.no_grad():
        model[1].weight[1] = 0  # of the other domain
    case = Case(model, images(), options={"loss": F.cross_entropy})
    assert case.examine("NK306").findings == []
    with torch.no_grad():
        model[1].weight[0, :3], model[1].bias[0, :3] = 0, -0.1
    (found,) = case.examine("NK306").findings
    assert (found.layer, found.evidence["channels"]) == ("1", 3)


def test_a_batch_in_parts_is_healthy():
    """Each part of a SplitBatchNorm2d has statistics of its own, far from the others'."""
    batches = images()
    for x, _ in batches:
        x[len(x) // 2 :].mul_(3).add_(4)
    model = nk.convert(cnn(), "split").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nk.watch(model, optimizer=optimizer) as ledger:
        for _ in range(8):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert ledger.findings == []
    clean = [(x[: len(x) // 2], y[: len(y) // 2]) for x, y in batches]
    for mode in (True, False):
        assert nk.examine(model.train(mode), clean, F.cross_entropy).ok


def test_a_batch_of_one_becomes_a_finding_and_the_rest_is_examined():
    batches = [*rows(), (torch.randn(1, 6), torch.zeros(1, dtype=torch.long))]
    diagnosis = nk.examine(settled(mlp(), rows()).train(), batches)
    assert [(one.code, one.layer) for one in diagnosis.findings] == [("NK107", "1")]
    without = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
    diagnosis = nk.examine(without, batches, select="NK107")
    assert [(one.code, one.layer) for one in diagnosis.findings] == [("NK107", "1")]


def test_an_instance_of_one_value_becomes_a_finding():
    model = nn.Sequential(nn.Conv2d(3, 8, 8), nn.InstanceNorm2d(8))
    diagnosis = nk.examine(model, [x for x, _ in images(2)])
    assert [(one.code, one.layer) for one in diagnosis.findings if one.code != "NK301"] == [("NK304", "1")]


def test_the_batch_that_brings_nan_is_named():
    batches = images()
    model = settled(cnn(), batches)
    batches[2][0][3, 1] = torch.inf
    (found,) = nk.examine(model, batches, select="NK103").findings
    assert (found.layer, found.severity, found.evidence["batch"]) == ("1", "warning", 2)


def test_padding_that_is_masked_is_not_counted():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(6, 8, 3, padding=1), nk.BatchNorm1d(8)

        def forward(self, x, mask):
            return self.norm(self.conv(x), mask=mask)

    lengths = torch.tensor([20, 8, 13, 6])
    mask = torch.arange(24) < lengths[:, None]
    batches = [(torch.randn(4, 6, 24) * mask[:, None], mask) for _ in range(3)]
    model = settled(Masked(), batches)
    assert Case(model, batches).found("NK109") == set()
    plain = nn.Sequential(model.conv, model.norm)
    assert Case(plain, [x for x, _ in batches]).found("NK109") == {"1"}
    (found,) = nk.examine(plain, [x for x, _ in batches], select="NK109").findings
    assert "with nk.masked(model, mask)" in found.remedy


def test_pictures_with_dark_borders_are_not_padded():
    x = torch.randn(8, 3, 20, 20)
    for i in range(8):
        x[i, :, :, : 2 + i % 3] = 0
        x[i, :, :, 15 + i % 3 :] = 0
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert Case(settled(model, [x]), [x]).found("NK109") == set()


@pytest.mark.parametrize("training", thinned([True, False], bool))
def test_an_exported_program_in_training_mode_is_found(training):
    model = settled(cnn(), images()).train(training)
    graph = torch.export.export(model, (images()[0][0],)).module()
    assert Case(graph, images()).found("NK501") == ({"1", "4"} if training else set())


def test_the_parity_of_a_fold_says_whether_it_is_good_enough():
    model, x = settled(cnn(), images()).eval(), images()[0][0]
    parity = nk.fold(model, x).parity
    assert parity.ok
    assert parity.error == parity.max_rel <= parity.tolerance == 1e-4
    assert tuple(parity) == (parity.max_abs, parity.max_rel, parity.first_layer)
