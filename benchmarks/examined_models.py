"""Networks that others wrote, trained for some steps in an ordinary loop, and what the doctor says of them: nothing.

Prints a line for each network, and one for each finding that is more than info. Exits with 1 if there was one. Some
networks only take pictures of 224 pixels: name others with a smaller --side.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the networks are shared with the tests
import normkit as nk
from support.architectures import ARCHITECTURES
from support.ordinary_training import batches_for, forward_for, loss, of_timm, trained


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks, timm's as timm:NAME; all of the table by default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=64, help="of pictures that are 224 pixels wide or more")
    args = parser.parse_args()
    wanted = [a for a in ARCHITECTURES if not args.names or a.name in args.names]
    known = [a for a in wanted if importlib.util.find_spec(a.package)]
    known += [of_timm(name.removeprefix("timm:")) for name in args.names if name.startswith("timm:")]
    unwell = 0
    for architecture in known:
        torch.manual_seed(1)
        batches = batches_for(architecture, 8, args.batch, args.side)
        begun = time.perf_counter()
        model, optimizer = trained(architecture, batches, args.steps, args.rate)
        took = time.perf_counter() - begun
        for mode in (True, False):
            found = nk.examine(model.train(mode), batches, loss, optimizer, forward_for(architecture))
            unwell += not found.ok
            bad = [one for one in found.findings if one.severity != "info"]
            what = f"{len(bad)} bad, {len(found.findings) - len(bad)} info"
            seconds = f"trained in {took:.0f} s, examined in {found.evidence['seconds']:.1f} s"
            print(f"{architecture.name}, {'training' if mode else 'evaluation'}: {what}; {seconds}", flush=True)
            for one in bad:
                print(f"    {one.severity} {one}", flush=True)
    sys.exit(bool(unwell))


if __name__ == "__main__":
    main()
