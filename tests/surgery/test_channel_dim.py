"""Norms with their channels in another dimension: what surgery can do with them is right, the rest it refuses."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import probes
from support.case import randomize_
from support.fold_checks import check, double, ready
from support.foreign_norms import picture, same_picture
from support.model_state import assert_same, everything

LENGTH, CHANNELS = 6, 5


class Turned(nn.Module):
    """Torch's norm with the channels moved there and back: what ours with dim=-1 is in the place of."""

    def __init__(self, **options):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, **options)

    def forward(self, x):
        return self.norm(x.movedim(-1, 1)).movedim(1, -1)


def net(norm):
    return nn.Sequential(nn.Linear(3, CHANNELS), norm, nn.Tanh(), nn.Linear(CHANNELS, 4))


def both(**options):
    """Our net and torch's, in the same random state."""
    ours, theirs = net(nk.BatchNorm1d(CHANNELS, dim=-1, **options)), net(Turned(**options))
    randomize_(ours)
    theirs.load_state_dict({key.replace("1.", "1.norm.", 1): value for key, value in ours.state_dict().items()})
    return ours, theirs


def batches():
    return [torch.randn(8, LENGTH, 3) * 2 + 1 for _ in range(3)]


# Equal numbers of positions and channels, so that nothing is right by its shape.
@pytest.mark.parametrize("length", [LENGTH, CHANNELS])
@pytest.mark.parametrize("after", [True, False], ids=["after linear", "before linear"])
def test_fold(after, length):
    norm = nk.BatchNorm1d(CHANNELS, dim=-1)
    layers = [nn.Linear(3, CHANNELS), norm] if after else [norm, nn.Linear(CHANNELS, 3)]
    model = ready(nn.Sequential(*layers))
    given = 3 if after else CHANNELS
    result = check(model, double(2, length, given), double(3, length, given))
    assert len(result.changed) == 1


class LengthMixing(nn.Module):
    """A linear layer over the positions before a norm of the channels: no scale per channel goes into it."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(CHANNELS, CHANNELS), nk.BatchNorm1d(CHANNELS, dim=-1)

    def forward(self, x):  # (N, L, C), and as long as it has channels
        return self.norm(self.mix(x.mT).mT).tanh()


def test_fold_into_what_has_other_channels_is_refused():
    model, x = ready(LengthMixing()), double(2, CHANNELS, CHANNELS)
    done = nk.fold(model, x)
    assert not done.changed
    torch.testing.assert_close(done.model(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["pooled", "paper"])
@pytest.mark.parametrize("exact", [False, True])
def test_recalibrate(method, exact):
    (ours, theirs), data = both(), batches()
    for model in (ours, theirs):
        nk.recalibrate(model, data, method=method, exact=exact, inplace=True)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(ours[1].get_buffer(name), theirs[1].norm.get_buffer(name), rtol=1e-5, atol=1e-5)


def test_adapt():
    (ours, theirs), data = both(), batches()
    adapted = [nk.adapt(model, data, method="adabn").model for model in (ours, theirs)]
    torch.testing.assert_close(adapted[0](data[0]), adapted[1](data[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")  # of what is skipped
@pytest.mark.parametrize(
    "to", ["sync", "frozen", "renorm", "ghost", "group", "instance", "layer", "rms", "dyt", "evo-s0"]
)
def test_no_other_norm_takes_its_place(to):
    model, x = both()[0], torch.randn(4, LENGTH, 3)
    before = picture(model)
    done = nk.convert(model, to, x, only="1", inplace=True)
    assert (done.changed, done.skipped[0].why) == ([], "its channels are in dimension -1, where no other norm has them")
    assert same_picture(before, picture(model))


def test_it_is_a_batch_norm_already():
    assert nk.convert(both()[0], "batch").skipped[0].why == "is one already"


def test_freeze_says_that_it_goes_on_moving():
    model = both()[0]
    with pytest.warns(nk.NormkitWarning, match="dimension -1"):
        done = nk.freeze(model)
    assert not done.changed


@pytest.mark.parametrize("training", [True, False])
def test_torchs_classes_have_no_such_option(training):
    model = both()[0].train(training)
    with pytest.warns(nk.NormkitWarning, match="dimension -1"):
        done = nk.convert(model, classes="torch")
    assert not done.changed


def test_torchs_converter_to_sync_batch_norm_is_refused():
    with pytest.raises(nk.UnsupportedError, match="channels in dimension -1"):
        nn.SyncBatchNorm.convert_sync_batchnorm(both()[0])


def test_timms_converters_are_refused():
    from support import aside  # noqa: F401  # where timm is

    pytest.importorskip("timm")
    import timm.layers

    import normkit.timm  # noqa: F401

    model = nn.Sequential(nk.BatchNorm2d(CHANNELS, dim=-1))
    with pytest.raises(nk.UnsupportedError, match="freeze_batch_norm_2d would not keep"):
        timm.layers.freeze_batch_norm_2d(model)


def test_a_checkpoint_for_another_dimension_is_refused(tmp_path):
    ours, theirs = nn.Sequential(nk.BatchNorm1d(5, dim=-1)), nn.Sequential(nn.BatchNorm1d(5))
    nk.save(ours, tmp_path / "model.safetensors")
    with pytest.raises(nk.MismatchError, match="channel_dim is -1 in the file, 1 in the model"):
        nk.load(theirs, tmp_path / "model.safetensors")
    nk.load(nn.Sequential(nk.BatchNorm1d(5, dim=-1)), tmp_path / "model.safetensors")


def test_merge_and_no_updates():
    (one, _), (two, _) = both(), both()
    assert nk.describe(nk.merge([one, two]).model[1]).channel_dim == -1
    before = everything(one)
    with nk.no_updates(one):
        one(batches()[0])
    assert_same(before, everything(one))


def test_the_doctor_sees_the_same_as_with_torchs():
    (ours, theirs), data = both(), batches()
    found = [{(f.code, f.name, f.severity) for f in nk.examine(model, data).findings} for model in (ours, theirs)]
    assert found[0] == found[1]
    assert ("NK301", "redundant-bias", "info") in found[0]


def test_the_doctor_takes_no_bias_over_positions_for_redundant():
    """The bias of a layer over the positions is another number at each of them, which no channel's mean has."""
    found = nk.examine(LengthMixing(), [torch.randn(8, CHANNELS, CHANNELS) for _ in range(2)]).findings
    assert "NK301" not in {f.code for f in found}


def test_the_doctor_counts_values_per_channel_without_stored_statistics():
    (ours, theirs), data = both(track_running_stats=False), batches()
    found = [{f.code for f in nk.examine(model, data).findings} for model in (ours, theirs)]
    assert found[0] == found[1]


def test_probes_go_by_channels():
    (ours, theirs), x = both(), batches()[0]
    kept = []
    for model, layer in ((ours, "1"), (theirs, "1.norm")):
        model = copy.deepcopy(model)
        with nk.attach(model, [probes.StatisticsNoise(layer), probes.ActivationMoments(layer)], every=1) as recorder:
            for _ in range(2):
                model(x)
                recorder.step()
        kept.append([{k: v for k, v in record.items() if k not in ("layer", "time")} for record in recorder.records])
    assert len(kept[0]) == len(kept[1]) > 0
    for a, b in zip(*kept, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == (pytest.approx(b[key], rel=1e-4, abs=1e-5) if isinstance(a[key], float) else b[key]), key
