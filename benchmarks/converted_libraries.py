"""Norms of networks that others wrote, converted to ours and back: which are taken, which are not, and why.

Every norm of each network of timm, transformers, pytorchcv and monai becomes ours of its own kind, and is undone; the
batch norms, in one call of `nk.convert(model, "batch")`, become ours and then torch's again. The networks are random,
with the statistics of three batches of noise, and every gamma and beta moved. Inputs are two examples, as small as a
network takes them.

A line of JSON for each network, and one for all: the norms, how many were taken, the reasons for the others, how far
the outputs moved, over the largest, in float32 and in float64, and whether undo gave back every bit. "own" is how far
the network in float32 is from itself in float64 before anything is converted: what another order of the same sums may
move. `--speed` also times a training step, in turns, over that of the original.

    python benchmarks/converted_libraries.py [--only NAME ...] [--speed]
    python benchmarks/converted_libraries.py --lines FILE ... --record FILE
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # networks are shared with the tests
import normkit as nk
from normkit.batches import feed, tensors_in
from normkit.surgery.norms import UNKNOWN, survey
from normkit.surgery.parity import difference
from normkit.surgery.replace.targets import TARGETS
from support import aside  # noqa: F401  # where timm is
from support.architectures import ARCHITECTURES, OF_OTHER_NORMS, Architecture, wide
from support.foreign_norms import picture, same_picture
from support.language_models import LANGUAGE_MODELS, SMALL, LanguageModel

# Networks of timm by the side of their images: with plain batch norms, with an activation inside, and with group,
# layer, RMS and filter response norms and EvoNorms, of maps and of tokens.
TIMM = {
    64: (
        *("densenet121", "darknet17", "resnetv2_50", "resnetv2_50d_gn", "resnetv2_50d_evos", "resnetv2_50d_frn"),
        *("test_byobnet", "test_efficientnet", "test_efficientnet_evos", "test_efficientnet_gn"),
        *("test_efficientnet_ln", "convnext_zepto_rms", "convnext_atto_rms"),
    ),
    96: (
        *("resnet18", "seresnet18", "res2net50_14w_8s", "regnetx_002", "regnety_002"),
        *("mobilenetv2_050", "mobilenetv3_small_050", "mobilenetv4_conv_small_050", "efficientnet_lite0"),
        *("mnasnet_small", "mixnet_s", "tinynet_e", "lcnet_050", "hardcorenas_a", "ghostnet_050", "repghostnet_050"),
        *("dla46_c", "ese_vovnet19b_slim_dw", "hgnetv2_b0", "starnet_s1", "efficientvit_b0", "mobilevitv2_050"),
        *("convnext_atto", "convnextv2_atto", "inception_next_atto", "mambaout_femto", "poolformerv2_s12"),
        *("edgenext_xx_small",),
    ),
    160: ("test_vit", "test_maxvit"),
    224: ("vit_tiny_patch16_224", "mixer_s32_224", "levit_128s", "xcit_nano_12_p16_224"),
}
# Those of the tests' networks of pytorchcv whose steps are short.
PYTORCHCV = (
    *("resnet20_cifar10", "preresnet20_cifar10", "seresnet20_cifar10", "sepreresnet20_cifar10", "ror3_56_cifar10"),
    *("densenet40_k12_cifar10", "diaresnet20_cifar10", "shakeshakeresnet20_2x16d_cifar10", "mobilenet_wd4"),
    *("mobilenetv2_wd4", "mobilenetv3_small_w1", "mnasnet_small", "shufflenet_g3_wd4", "shufflenetv2_wd2", "igcv3_wd4"),
    *("menet108_8x1_g3", "sqnxt23_w1", "ghostnet", "regnetx002", "octresnet10_ad2", "erfnet_cityscapes"),
    *("enet_cityscapes",),
)
# More language models, beside those whose gammas the tests fold.
TRANSFORMERS = {
    "BertModel": "BertConfig",
    "ModernBertModel": "ModernBertConfig",
    "GPTNeoXForCausalLM": "GPTNeoXConfig",
    "MistralForCausalLM": "MistralConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Phi3ForCausalLM": "Phi3Config",
}
TOO_SLOW = ("VNet",)
ROUNDS = 9
WARMING_UP = 2


class Network(NamedTuple):
    """A network: how it is built, in evaluation and with state of its own, and an example for it."""

    name: str
    home: str
    build: Callable[[], nn.Module]
    example: Any


def networks():
    """Every network, by package."""
    for one in (*ARCHITECTURES, *OF_OTHER_NORMS):
        if one.name in PYTORCHCV or (one.package != "pytorchcv" and one.name not in TOO_SLOW):
            yield trained(one)
    more = [LanguageModel(name, config, SMALL) for name, config in TRANSFORMERS.items()]
    for one in (*LANGUAGE_MODELS, *more):
        yield Network(one.name, "transformers", one.build, one.example())
    for side, names in TIMM.items():
        for name in names:
            yield trained(Architecture(name, "timm", lambda name=name: of_timm(name), (3, side, side)))


def of_timm(name):
    import timm

    return timm.create_model(name)


def trained(architecture):
    def build():
        return with_moved_gammas(architecture.trained(rate=0.0))  # weights that moved would outrun their statistics

    return Network(architecture.name, architecture.package, build, architecture.example(seed=9))


@torch.no_grad()
def with_moved_gammas(model):
    """Move gamma and beta of the norms within an example too: defaults hide what becomes of them."""
    for _, layer, spec in survey(model).norms:
        gamma, beta = (layer._parameters.get(name) for name in spec.names)
        if spec.kind != "batch" and gamma is not None:
            gamma.mul_(torch.rand_like(gamma) + 0.5)
        if spec.kind != "batch" and beta is not None:
            beta.add_(0.2 * torch.randn_like(beta))
    return model


def outputs(model, example):
    """What it gives in evaluation, of which nothing could be said if it were NaN."""
    with torch.no_grad():
        given = [t.clone() for t in tensors_in(feed(model.eval(), example)) if t.is_floating_point()]
    if not all(t.isfinite().all() for t in given):
        raise ValueError(f"{type(model).__name__} gives infinite values or NaN")
    return given


def moved(before, after):
    """The largest difference of outputs, over the largest of each."""
    return max(difference(a, b)[1] for a, b in zip(before, after, strict=True))


class ByKind:
    """A model whose norms are turned into ours, those of each kind in one call, in place."""

    def __init__(self, model, example):
        found = survey(model)
        names = {}
        for name, _, spec in found.norms:
            names.setdefault(spec.kind, []).append(name)
        self.norms = len(found.norms) + len(found.unknown)
        self.reasons = Counter({UNKNOWN: len(found.unknown)}) if found.unknown else Counter()
        self.done = []
        for kind, which in names.items():
            if kind in TARGETS:
                self.done.append(nk.convert(model, kind, example, only=which, inplace=True))
                self.reasons += reasons(one for one in self.done[-1].skipped if one.layer in which)
            else:
                self.reasons[f'there is no target "{kind}"'] += len(which)
        self.taken = sum(len(result.changed) for result in self.done)

    def undo(self):
        """Turn them back, the last first."""
        for result in reversed(self.done):
            result.undo()


def reasons(skipped):
    """How often each reason was given."""
    return Counter(one.why for one in skipped)


def measured(network, speed):
    """All that is known of one network."""
    model, example = network.build(), network.example
    before, given = picture(model), outputs(model, example)
    at_once = batch_norms_at_once(model, example, given)
    theirs = copy.deepcopy(model)
    ours = ByKind(model, example)
    record = {
        "network": network.name,
        "from": network.home,
        "norms": ours.norms,
        "taken": ours.taken,
        "reasons": dict(ours.reasons),
        "batch": at_once,
        "float32": moved(given, outputs(model, example)),
    }
    if speed:
        record["step"] = ratio(copy.deepcopy(theirs), copy.deepcopy(model), example)
    ours.undo()
    record["undone"] = same_picture(before, picture(model))
    is_text = isinstance(example, dict) and "input_ids" in example
    twin, wide_example = theirs.double(), example if is_text else wide(example)
    exact = outputs(twin, wide_example)
    ByKind(twin, wide_example)
    return record | {"float64": moved(exact, outputs(twin, wide_example)), "own": moved(exact, given)}


def batch_norms_at_once(model, example, given):
    """What one call makes of the batch norms, if there are any, and how far the outputs move, there and back."""
    if not any(norm.spec.kind == "batch" for norm in survey(model).norms):
        return None
    there = nk.convert(model, "batch")
    back = nk.convert(there.model, "batch", classes="torch")
    return {
        "taken": len(there.changed),
        "reasons": dict(reasons(there.skipped)),
        "float32": moved(given, outputs(there.model, example)),
        "back": moved(given, outputs(back.model, example)),
    }


def ratio(model, ours, example):
    """How long a training step takes, over the original's: medians of steps in turns, each first in every other."""
    times = {"theirs": [], "ours": []}
    turns = [("theirs", model.train()), ("ours", ours.train())]
    for _ in range(WARMING_UP + ROUNDS):
        for name, one in turns:
            begun = time.perf_counter()
            given = [t for t in tensors_in(feed(one, example)) if t.requires_grad]
            sum(t.float().square().mean() for t in given).backward()
            times[name].append(time.perf_counter() - begun)
            one.zero_grad()
        turns.reverse()
    return median(times["ours"][WARMING_UP:]) / median(times["theirs"][WARMING_UP:])


def summary(records):
    """All networks in a line."""

    def largest(key):
        return max(records, key=lambda record: record[key])

    found = {
        "networks": len(records),
        "from": dict(Counter(record["from"] for record in records)),
        "norms": sum(record["norms"] for record in records),
        "taken": sum(record["taken"] for record in records),
        "reasons": dict(sum((Counter(record["reasons"]) for record in records), Counter())),
        "undone": sum(record["undone"] for record in records),
    }
    for key in ("float32", "float64"):
        found[key] = {"median": median(record[key] for record in records), "largest": largest(key)[key]}
        found[key]["of"] = title(largest(key))
    if all("step" in record for record in records):
        worst = largest("step")
        found["step"] = {"median": median(record["step"] for record in records), "worst": worst["step"]}
        found["step"]["of"] = title(worst)
    return found


def title(record):
    """What to call a network: packages use the same names."""
    return f"{record['network']} of {record['from']}"


def in_digits(value):
    """Numbers as one reads them, in any nesting."""
    if isinstance(value, dict):
        return {key: in_digits(one) for key, one in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def as_record(records):
    """The tables that docs/records keeps."""
    return {
        "run": f"`benchmarks/converted_libraries.py`: random networks, two examples each, torch {torch.__version__}.",
        "reported": time.strftime("Measured on %Y-%m-%d."),
        "tables": [by_package(records), left(records), by_network(records)],
    }


def by_package(records):
    """How many networks and norms of each, and the largest differences."""
    rows = []
    for home in dict.fromkeys(record["from"] for record in records):
        ours = [record for record in records if record["from"] == home]
        sums = [sum(record[key] for record in ours) for key in ("norms", "taken", "undone")]
        rows.append([home, len(ours), *sums, *(max(record[key] for record in ours) for key in ("float32", "float64"))])
    columns = ["from", "networks", "norms", "taken", "networks undone bit for bit", "float32, largest"]
    return table("By package", [*columns, "float64, largest"], rows)


def left(records):
    """The reasons for the norms that were not taken."""
    norms, nets = Counter(), Counter(why for record in records for why in record["reasons"])
    for record in records:
        norms.update(record["reasons"])
    rows = [[count, nets[why], why] for why, count in norms.most_common()]
    return table("Norms that were left", ["norms", "networks", "why"], rows)


def by_network(records):
    """A row for each."""
    columns = ["network", "from", "norms", "taken", "float32", "own", "float64"]
    columns += ["step"] if all("step" in record for record in records) else []
    return table("Networks", columns, [[record[key] for key in columns] for record in records])


def table(title, columns, rows):
    """As the directive `record` shows it."""
    cells = [[f"{cell:.2g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return {"title": title, "columns": columns, "rows": cells}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of networks")
    parser.add_argument("--speed", action="store_true", help="also time a training step")
    parser.add_argument("--lines", nargs="*", type=Path, help="files of lines to sum up, instead of measuring")
    parser.add_argument("--record", type=Path, help="where to write the tables for the documentation")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    records = []
    for record in earlier(asked.lines) if asked.lines else now(asked.only, asked.speed):
        records.append(record)
        print(json.dumps(record), flush=True)
    print(json.dumps(in_digits(summary(records))))
    if asked.record:
        asked.record.write_text(json.dumps(as_record(records), indent=1) + "\n")


def now(only, speed):
    """The records of the networks, each as soon as it is measured."""
    for network in networks():
        if not only or network.name in only:
            yield in_digits(measured(network, speed))


def earlier(files):
    """The records that other runs have printed, without their last lines."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "network" in line]


if __name__ == "__main__":
    main()
