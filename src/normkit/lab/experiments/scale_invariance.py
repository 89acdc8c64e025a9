"""Weights before a norm have a direction and no size: what the size, and its decay, do instead (3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.figures.figure import Figure, Table
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.experiment import Arm, Experiment, Scale, Training, Trial
from normkit.lab.findings import Findings
from normkit.lab.models.relu_nets import relu_mlp
from normkit.lab.models.toy_problem import (
    FACTORS,
    NO_EPS,
    ToyNet,
    direction_distance,
    exact_norm,
    scaling_errors,
    with_growing_rate,
)
from normkit.lab.probed import agreed
from normkit.lab.record import Run, TrialRecord
from normkit.lab.summaries import curve_over_seeds, is_complete, verdict, with_range

TOYS = ("toy", "toy-momentum")
GROWTH = "no-decay"
DECAYS = ("decay", "decay-large-start", "decay-momentum")
TOY_STEPS = {"quick": 40, "desk": 400, "full": 400}
GROWTH_STEPS = {"quick": 12, "desk": 300, "full": 1000}
STEPS = {"quick": 60, "desk": 4000, "full": 40_000}
EVERY = {"quick": 10, "desk": 20, "full": 100}
HIDDEN = {"quick": (20, 20), "desk": (100, 100), "full": (500, 500, 500)}
IDENTITY, DIRECTION, GROWN = 1e-10, 1e-9, 1e-6  # largest relative errors in double precision
REST = 0.1  # how far, at most, norms and angles are from where they are predicted to rest
LONG = 6.0  # relaxations that norms are given: half of them to come to rest in, from four times their size too
IDENTITIES = {"output": "output", "input_gradient": "gradient by the input", "weight_gradient": "gradient by weights"}
NOTES = (
    f"(a) holds if, of the toy net, no identity is off by more than {IDENTITY:g}, for weights multiplied by "
    f"{', '.join(f'{a:g}' for a in FACTORS)}, layer by layer; errors are relative to the largest value. (b) holds if "
    f"at each step of the net without decay the squared norm of each layer before a norm grows, and by rate^2 |g|^2 up "
    f"to {GROWN:g} of that. (c) holds if, over the second half of the training with decay, the norm of each such layer "
    f"and its angle per step are within {REST:.0%} of the prediction, with momentum and without, and from weights four "
    f"times as large: the norm in the median, the angle in the mean square. A training of fewer than "
    f"{LONG:g} relaxation times, (1 - momentum) / (rate decay), leaves it open. (d) holds if the directions of the toy "
    f"net's weights, trained with decay at a constant rate, end within {DIRECTION:g} of those without decay and with a "
    "rate that grows exponentially.",
    "Each part is judged seed by seed: it holds if it does with every seed, fails if it does with none, and is open "
    "otherwise. The claim is supported if all four hold, and contradicted if one of them fails.",
    "The toy net has two layers with tanh between their norms, 64 examples, and squared errors: in double precision, "
    "and with an eps that no variance notices, for which alone the identities are exact. Its rates are low enough for "
    "a smooth descent: where a rate is unstable, roundings grow, and trajectories part that are the same on paper. "
    "(b) is of images, in double precision too; (c) in single precision with the usual eps of 1e-5.",
    "Decay is of the weights before norms alone, as L2 in the gradient. The predicted norm takes the mean square of "
    "the gradients, at weights of norm one, over the last twenty measured steps; the predicted angle takes nothing but "
    "rate, decay and momentum. With momentum, both assume that gradients of different steps are independent.",
    "With momentum the growing rate is rate * a^(-2t - 1), with a the larger root of x^2 - (1 + momentum - rate decay) "
    "x + momentum = 0; without, a is 1 - rate decay (Li & Arora 2019). The velocity begins as that of weights which "
    "have only shrunk before.",
    "Rates and decays were chosen after short looks: 300 to 500 steps of the toy net at several rates, some of them "
    "unstable, with three seeds; 60 steps without decay; up to 3000 steps with decay, with one seed, for norms to rest "
    "before the second half. Tolerances were written before any run of all arms. That short trainings leave (c) open "
    "was added after a run at the quick scale, which is too short for norms to rest.",
)


class ScaleInvariance(Experiment):
    """A toy net for what is exact, and nets on images for what weights' norms do."""

    name = "scale-invariance"
    claim = (
        "(a) The scale of weights before Batch Normalization changes neither output nor backpropagation, and larger "
        "weights have smaller gradients. (b) Without decay their norm only grows. (c) With decay norm and angle per "
        "step come to rest where rate, decay and gradients balance. (d) Decay at a constant rate is a rate that grows "
        "exponentially without decay."
    )
    source = "Ioffe & Szegedy 2015, section 3.3; van Laarhoven 2017; Li & Arora 2019"

    def arms(self, scale: Scale) -> Sequence[Arm]:
        """The toy net with momentum and without; nets without decay, with it, from large weights, with momentum."""
        usual = {"rate": 0.1, "decay": 0.02, "momentum": 0.0, "scale": 1.0, "batch": 100, "precision": "single"}
        usual |= {"hidden": list(HIDDEN[scale]), "steps": STEPS[scale], "every": EVERY[scale]}
        toy = {"rate": 0.3, "decay": 0.005, "momentum": 0.0, "scale": 2.0, "steps": TOY_STEPS[scale]}
        return [
            Arm(TOYS[0], toy),
            Arm(TOYS[1], toy | {"rate": 0.03, "momentum": 0.9}),
            Arm(GROWTH, usual | {"decay": 0.0, "precision": "double", "steps": GROWTH_STEPS[scale], "every": 1}),
            Arm(DECAYS[0], usual),
            Arm(DECAYS[1], usual | {"scale": 4.0}),
            Arm(DECAYS[2], usual | {"rate": 0.02, "momentum": 0.9}),
        ]

    def training(self, trial: Trial) -> Training:
        """The toy problem, or SGD on standardized images, watched by `EffectiveRate`."""
        return _on_toy(trial) if trial.arm.name in TOYS else _on_images(trial)

    def findings(self, run: Run) -> Findings:
        """Judge the four parts."""
        ended = Run(run.path, [trial for trial in run.trials if trial.end])
        parts = (_identities(ended), _growth(ended), _rest(ended), _directions(ended))
        complete = is_complete(run, self.arms(run.header["scale"]))
        return Findings(
            self.claim,
            self.source,
            verdict([holds for holds, _ in parts], complete, contradicted_by="any"),
            [reason for _, reason in parts],
            [_identity_table(ended), _rest_table(ended)],
            _figures(ended),
            NOTES,
        )


EXPERIMENT = ScaleInvariance()


def _on_toy(trial: Trial) -> Training:
    settings = trial.arm.settings
    model = ToyNet(exact_norm, settings["scale"], trial.seed)
    start, batch = model.weights(), model.batch()

    def measure(_: nn.Module) -> dict[str, Any]:  # after the last step
        twin = with_growing_rate(model, start, batch, settings, settings["steps"])
        apart = max(map(direction_distance, model.weights(), twin))
        turned = min(map(direction_distance, model.weights(), start))
        return scaling_errors(model, batch) | {"direction": apart, "turned": turned}

    return Training(
        model,
        torch.optim.SGD(
            model.parameters(), lr=settings["rate"], momentum=settings["momentum"], weight_decay=settings["decay"]
        ),
        lambda start: repeat(batch),
        settings["steps"],
        lambda step: False,
        measure,
        loss=nn.functional.mse_loss,
    )


class _DoubleFlatten(nn.Flatten):
    """Images as vectors in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


def _on_images(trial: Trial) -> Training:
    settings, found = trial.arm.settings, data.load(trial.data)
    is_double = settings["precision"] == "double"
    norm = partial(nk.BatchNorm1d, eps=NO_EPS) if is_double else nk.BatchNorm1d
    model = relu_mlp(norm, found.train.pixels[0].numel(), settings["hidden"], len(found.classes))
    models.initialize_(model, "he", settings["scale"], seed=trial.seed)
    if is_double:
        model.double()[0] = _DoubleFlatten()
    named = list(model.named_parameters())
    weights, others = ([p for name, p in named if name.endswith(".layer.weight") is of] for of in (True, False))
    groups = [{"params": weights, "weight_decay": settings["decay"]}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=settings["rate"], momentum=settings["momentum"])
    training = Classification(found).training(trial, model, optimizer, lambda step: step % settings["every"] == 0)
    training.probes = lambda loss: [nk.probes.EffectiveRate()]
    return training


# ---- what the records say

Judgement = tuple[bool | None, str]


def of_layers(trial: TrialRecord) -> dict[str, TrialRecord]:
    """What the probe recorded of each layer before a norm; the name of the output's layer does not end so."""
    records = [record for line in trial.measured for record in line.get("probes", ())]
    names = sorted({record["layer"] for record in records if record["layer"].endswith(".layer")})
    return {name: replace(trial, measured=[record for record in records if record["layer"] == name]) for name in names}


def _seed_by_seed(run: Run, arms: Sequence[str], is_so: Callable[[TrialRecord], bool]) -> bool | None:
    """Whether something is so of all arms with every seed, or with none; None if seeds disagree, or there are none."""
    seeds: dict[int, list[bool]] = {}
    for trial in (trial for arm in arms for trial in run.of(arm)):
        seeds.setdefault(trial.seed, []).append(bool(trial.measured) and is_so(trial))
    return agreed([all(answers) for answers in seeds.values()])


def _ends(run: Run, arms: Sequence[str], key: str) -> list[float]:
    return [trial.measured[-1][key] for arm in arms for trial in run.of(arm) if trial.measured]


def _identities(run: Run) -> Judgement:
    errors = ", ".join(f"{text} {_largest(_ends(run, TOYS, key))}" for key, text in IDENTITIES.items())
    held = _seed_by_seed(run, TOYS, lambda trial: all(trial.measured[-1][key] <= IDENTITY for key in IDENTITIES))
    return held, f"(a) With scaled weights, the largest relative errors: {errors}."


def _growth(run: Run) -> Judgement:
    ratios = [ratio for trial in run.of(GROWTH) for ratio in growth(trial)]
    held = _seed_by_seed(run, [GROWTH], lambda trial: _is_one(growth(trial), GROWN))
    return held, (
        f"(b) Without decay squared norms grow in {sum(ratio > 0 for ratio in ratios):,} of {len(ratios):,} steps of "
        f"layers, by rate^2 |g|^2 up to {_largest([abs(ratio - 1) for ratio in ratios])} of it."
    )


def growth(trial: TrialRecord) -> list[float]:
    """What the squared norm of each layer before a norm grows by in each step, over rate^2 |g|^2."""
    return [
        (then["norm"] ** 2 - now["norm"] ** 2) / (now["rate"] * now["gradient"]) ** 2
        for layer in of_layers(trial).values()
        for now, then in pairwise(layer.measured)
    ]


def relaxations(trial: TrialRecord) -> float:
    """How many times longer a training is than weights take to forget their norm: (1 - momentum) / (rate decay)."""
    settings = trial.header["settings"]
    return float(settings["steps"] * settings["rate"] * settings["decay"] / (1 - settings["momentum"]))


class Rest(NamedTuple):
    """Where a layer's weights rest over the second half of a training."""

    norm: float
    norm_ratio: float  # to the prediction
    angle: float
    angle_ratio: float


def rests(trial: TrialRecord) -> dict[str, Rest]:
    """Where each layer before a norm comes to rest."""
    return {name: _rest_of(layer.measured[len(layer.measured) // 2 :]) for name, layer in of_layers(trial).items()}


def _rest_of(lines: Sequence[Mapping[str, Any]]) -> Rest:
    ratio = median(line["norm"] / line["equilibrium_norm"] for line in lines)
    angle = math.sqrt(fmean(line["angle"] ** 2 for line in lines))
    return Rest(median(line["norm"] for line in lines), ratio, angle, angle / lines[-1]["equilibrium_angle"])


def _rest(run: Run) -> Judgement:
    found = [rest for arm in DECAYS for trial in run.of(arm) for rest in rests(trial).values()]
    norms, angles = [rest.norm_ratio for rest in found], [rest.angle_ratio for rest in found]

    def is_predicted(trial: TrialRecord) -> bool:
        return _is_one([ratio for rest in rests(trial).values() for ratio in (rest.norm_ratio, rest.angle_ratio)], REST)

    is_long = all(relaxations(trial) >= LONG for arm in DECAYS for trial in run.of(arm))
    return _seed_by_seed(run, DECAYS, is_predicted) if is_long else None, (
        f"(c) With decay, over layers and trials, norms rest at {with_range(norms, 3)} times the prediction, and "
        f"angles per step at {with_range(angles, 3)} times."
    )


def _directions(run: Run) -> Judgement:
    apart, turned = (_ends(run, TOYS, key) for key in ("direction", "turned"))
    return _seed_by_seed(run, TOYS, lambda trial: trial.measured[-1]["direction"] <= DIRECTION), (
        f"(d) Decay at a constant rate, and a growing rate without decay, end in directions {_largest(apart)} apart at "
        f"most, each {with_range(turned, 2)} or more away from where it began."
    )


def _is_one(ratios: Sequence[float], tolerance: float) -> bool:
    return bool(ratios) and all(abs(ratio - 1) <= tolerance for ratio in ratios)


def _largest(values: Sequence[float]) -> str:
    return f"{max(values):.1g}" if values else "-"


def _identity_table(run: Run) -> Table:
    columns = {**IDENTITIES, "direction": "direction, decay or growing rate"}
    rows = [[arm, *(_largest(_ends(run, [arm], key)) for key in columns)] for arm in TOYS]
    note = "The largest over seeds, layers and factors; of the first three, relative to the largest value."
    return Table("Errors of what is exact", ["arm", *columns.values()], rows, note)


def _rest_table(run: Run) -> Table:
    rows = []
    for arm in DECAYS:
        found = [rests(trial) for trial in run.of(arm)]
        for layer in found[0] if found else ():
            columns = zip(*(of[layer] for of in found if layer in of), strict=True)
            cells = [with_range(of, digits) for of, digits in zip(columns, (3, 3, 4, 3), strict=True)]
            rows.append([arm, layer, *cells])
    names = ["arm", "layer", "norm", "over the prediction", "angle per step", "over the prediction"]
    note = "Over the second half of the training: of the norm the median, of the angle the root mean square. "
    return Table("Where norms and angles rest", names, rows, note + "Median (range) over seeds.")


def _figures(run: Run) -> list[Figure]:
    def figure(arm: str, what: str) -> Figure:
        first = [next(iter(layers.values())) for trial in run.of(arm) if (layers := of_layers(trial))]
        shown = {f"{what} of the first layer": what, "prediction": f"equilibrium_{what}"}
        curves = [curve for name, key in shown.items() if (curve := curve_over_seeds(name, first, key)).y]
        return Figure(f"{what.capitalize()}, {arm}", "steps", what, curves, "Median and range over seeds.")

    return [figure(GROWTH, "norm"), *(figure(arm, what) for arm in DECAYS for what in ("norm", "angle"))]
