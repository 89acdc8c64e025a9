"""Networks that others wrote, trained for some steps in an ordinary loop, and what the doctor says of them: nothing.

The loop runs under `nk.watch`; then `nk.examine` looks at the network in training and in evaluation mode. Prints a line
for each network, and one for each finding that is more than info. Exits with 1 if there was one. With `--out`, the
rows also go to a record for the documentation, in which those of an earlier call stay: a network may have a process of
its own.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the networks are shared with the tests
import normkit as nk
from support.architectures import ARCHITECTURES
from support.ordinary_training import batches_for, begun, forward_for, loss, of_timm, train

COLUMNS = ["network", "from", "norms", "input", "batch", "steps", "loss, first to last", "watch", "examine"]


class Setting(NamedTuple):
    """How a network is trained.

    Attributes:
        side: of pictures that are 224 pixels wide or more; some networks take no others than those.
        batch: examples in each.
        steps: of SGD.
    """

    side: int = 64
    batch: int = 16
    steps: int = 60


WHOLE = Setting(side=224, batch=8)  # a pooling of 7x7 at the end takes no smaller pictures
SETTINGS = {
    # pytorchcv, at 32x32
    **dict.fromkeys(("resnet20_cifar10", "preresnet20_cifar10", "seresnet20_cifar10"), Setting()),
    **dict.fromkeys(("sepreresnet20_cifar10", "diaresnet20_cifar10", "shakeshakeresnet20_2x16d_cifar10"), Setting()),
    **dict.fromkeys(("densenet40_k12_cifar10", "xdensenet40_2_k24_bc_cifar10"), Setting()),
    # pytorchcv, at 224x224
    **dict.fromkeys(("mobilenet_wd4", "mobilenetv2_wd4", "mobilenetv3_small_w1", "mnasnet_small"), WHOLE),
    **dict.fromkeys(("shufflenet_g3_wd4", "shufflenetv2_wd2", "menet108_8x1_g3", "sqnxt23_w1", "igcv3_wd4"), WHOLE),
    # pytorchcv, of any size
    **dict.fromkeys(("erfnet_cityscapes", "enet_cityscapes"), Setting(batch=8)),
    # monai
    **dict.fromkeys(("BasicUNet", "UNet", "SegResNet", "DynUNet", "DenseNet121"), Setting()),
    # transformers
    **dict.fromkeys(("ResNetForImageClassification", "RegNetModel", "LevitModel", "MobileViTModel"), Setting()),
    **dict.fromkeys(("SegformerForSemanticSegmentation", "PatchTSTModel"), Setting()),
    # timm
    **dict.fromkeys(("timm:resnet10t", "timm:resnet18", "timm:regnetx_002", "timm:regnety_002"), Setting()),
    **dict.fromkeys(
        ("timm:mobilenetv3_small_050", "timm:lcnet_050", "timm:tinynet_e", "timm:mnasnet_small"), Setting()
    ),
    **dict.fromkeys(("timm:dla46_c", "timm:ese_vovnet19b_slim_dw", "timm:ghostnet_050", "timm:repvgg_a0"), Setting()),
    **dict.fromkeys(("timm:hardcorenas_a", "timm:edgenext_xx_small", "timm:convnext_atto"), Setting()),
}


def network(name):
    """A network by its name in SETTINGS; None if the package that has it is not installed."""
    if name.startswith("timm:"):
        return of_timm(name.removeprefix("timm:"))
    found = {architecture.name: architecture for architecture in ARCHITECTURES}[name]
    return found if importlib.util.find_spec(found.package) else None


def bad(findings):
    return [one for one in findings if one.severity != "info"]


def told(findings):
    """What was found, for a cell of a table: codes, with the number of layers."""
    codes = [one.code for one in bad(findings)]
    return ", ".join(f"{code} ({codes.count(code)})" for code in sorted({*codes})) or "nothing"


def visited(architecture, setting, rate):
    """Train under watch, examine in both modes; the findings of each, and a row of the table."""
    torch.manual_seed(1)
    batches, forward = batches_for(architecture, 8, setting.batch, setting.side), forward_for(architecture)
    model, optimizer = begun(architecture, rate)
    with torch.no_grad(), nk.no_updates(model):
        first = loss(forward(model, batches[0]), batches[0][1]).item()
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(architecture, model, optimizer, batches, setting.steps)
    with torch.no_grad(), nk.no_updates(model):
        last = loss(forward(model, batches[0]), batches[0][1]).item()
    assert ledger.stopped is None, ledger.stopped
    diagnoses = [nk.examine(model.train(mode), batches, loss, optimizer, forward) for mode in (True, False)]
    examined = list({(one.code, one.layer): one for each in diagnoses for one in each.findings}.values())
    layers = len(diagnoses[0].evidence["layers"])
    shape = "x".join(map(str, batches[0][0].shape[1:]))
    row = [architecture.name, architecture.package, layers, shape, setting.batch, setting.steps]
    return ledger.findings, examined, [*row, f"{first:.2f} to {last:.2f}", told(ledger.findings), told(examined)]


def keep(path, row):
    """Put a row into the record, in the place of an older one of the same network."""
    record = json.loads(path.read_text()) if path.exists() else {"tables": [{"title": "", "columns": COLUMNS}]}
    table = record["tables"][0]
    rows = {(each[1], each[0]): each for each in table.get("rows", [])} | {(row[1], row[0]): row}
    table["rows"] = [rows[key] for key in sorted(rows)]
    path.write_text(json.dumps(record, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks, timm's as timm:NAME; by default all that have a setting")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--side", type=int, help="of pictures that are 224 pixels wide or more")
    parser.add_argument("--list", action="store_true", help="print the names, and do nothing")
    parser.add_argument("--out", type=Path, help="a record to put the rows into")
    args = parser.parse_args()
    if args.list:
        print("\n".join(SETTINGS))
        return
    own = {key: value for key in Setting._fields if (value := getattr(args, key)) is not None}
    unwell = 0
    for name in args.names or SETTINGS:
        architecture = network(name)
        if architecture is None:
            print(f"{name}: not installed", flush=True)
            continue
        begun_at = time.perf_counter()
        watched, examined, row = visited(architecture, SETTINGS.get(name, Setting())._replace(**own), args.rate)
        took = time.perf_counter() - begun_at
        print(f"{name}: watch {row[-2]}, examine {row[-1]}; loss {row[-3]}; {took:.0f} s", flush=True)
        for one in bad([*watched, *examined]):
            print(f"    {one.severity} {one}", flush=True)
        unwell += bool(bad([*watched, *examined]))
        if args.out:
            keep(args.out, row)
    sys.exit(bool(unwell))


if __name__ == "__main__":
    main()
