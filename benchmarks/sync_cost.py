"""What synchronized norms cost: collectives and steps measured here, and what the cost model predicts elsewhere.

Collectives of torch.distributed (gloo) are timed at 2 and 4 processes, and the model is fitted to them. Then training
steps are timed with SyncBatchNorm and without, beside what the fitted model says of them; every collective of a step
is counted. Steps with group and ghost norms in one process are the alternative. Last, the model predicts 8 to 4096
ranks on named networks, over links whose latency and bandwidth are assumed. With `--out`, a record and its picture are
written.

It takes about 4 minutes on 2 cores that are idle; --quick, for a look, takes one, and its numbers are worth nothing.
Needs pytorchcv.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import distributed, nn
from torch.multiprocessing import get_context
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import normkit as nk
from normkit.bench.sync_cost import (
    Accelerator,
    Link,
    Timing,
    bytes_sent,
    collectives,
    fitted,
    group_sizes,
    most_ranks,
    norm_channels,
    training_seconds,
)
from normkit.environment import describe_environment
from normkit.figures import Curve, Figure, write_stack
from normkit.lab import models

WORLDS = (2, 4)
DEADLINE = 240.0  # seconds for the processes of one measurement
NUMBERS = (17, 129, 513, 1025, 4097, 32769, 262145)  # of a collective: those of layers, and more, for the bandwidth
RANKS = (8, 16, 64, 256, 1024, 4096)
ENOUGH = (
    32  # examples whose statistics are good enough: BatchNorm's error grows below (Wu & He 2018, of 32 to 2 images)
)
EXAMPLES = (2, 4, 8, 16)  # on a rank
COMPUTED = 320  # rows of the square matrices that are multiplied between two collectives

# What is assumed, not measured. NCCL's launch takes 10 us on any of them.
LINKS = (
    Link("NVLink", 10e-6, 1e-6, 200e9),
    Link("InfiniBand, 400 Gb/s", 10e-6, 3e-6, 45e9),
    Link("Ethernet, 400 Gb/s", 10e-6, 8e-6, 40e9),
    Link("Ethernet, 100 Gb/s", 10e-6, 25e-6, 10e9),
)
ACCELERATOR = Accelerator(operations=150e12, memory=1.5e12, launch=5e-6)
PER_RANK = 32  # examples
BUDGET = 0.1  # of a step's compute: what one gives for the statistics of a larger batch, unless a group norm costs more


def small_inception():
    return models.small_inception(nk.BatchNorm2d), torch.randn(32, 1, 28, 28)


def resnet18():
    return models.resnet18(nk.BatchNorm2d, classes=10, width=32), torch.randn(16, 3, 64, 64)


MEASURED = {"small Inception, 32 of 28x28": small_inception, "ResNet-18 of half width, 16 of 64x64": resnet18}


def predicted_networks():
    """Networks with their channels and what a step computes, by examples, as they are."""
    from pytorchcv.models.efficientnet import efficientnet_b0
    from pytorchcv.models.resnet import resnet50

    made = {
        "ResNet-50": (resnet50, 224, 224),
        "BN-Inception": (lambda: models.bn_inception(nk.BatchNorm2d, init=None), 224, 224),
        "EfficientNet-B0": (efficientnet_b0, 224, 224),
        "ResNet-50, 800x1216": (lambda: resnet50(in_size=(800, 1216)), 800, 1216),  # as in detectors
    }
    found = {}
    for name, (make, *size) in made.items():
        with torch.device("meta"):
            model = make()
            batches = {examples: torch.empty(examples, 3, *size) for examples in (*EXAMPLES, PER_RANK)}
        if name.startswith("ResNet-50"):
            model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # for images of any size
        seconds = {examples: training_seconds(model, batch, ACCELERATOR) for examples, batch in batches.items()}
        found[name] = norm_channels(model), seconds
    return found


# ---- processes


def on_ranks(work, world, *args):
    """What rank 0 finds when all ranks work; an error, or an end of time, ends all of them."""
    context = get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        target = partial(run_rank, work, world, f"file://{folder}/store", found, args)
        processes = [context.Process(target=target, args=(rank,), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + DEADLINE
        try:
            while found.empty():
                if time.monotonic() > deadline or any(process.exitcode for process in processes):
                    sys.exit(f"{work.__name__} over {world} processes did not end as it should.")
                time.sleep(0.05)
            return found.get()
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_rank(work, world, store, found, args, rank):
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=1))
    result = work(rank, world, *args)
    distributed.barrier()
    if rank == 0:
        found.put(result)
        time.sleep(DEADLINE)  # until it is read, and the process ended


def time_collectives(rank, world, rounds):
    """The median times of both collectives, for several numbers of numbers.

    As in a step, each rank computes for about a millisecond before: the others wait for the slowest, and must wake up.
    """
    timings = []
    square = torch.randn(COMPUTED, COMPUTED)
    for numbers in NUMBERS:
        own = torch.randn(numbers)
        every = [torch.empty_like(own) for _ in range(world)]
        work = {
            "all_gather": lambda own=own, every=every: distributed.all_gather(every, own),
            "all_reduce": lambda own=own: distributed.all_reduce(own),
        }
        for name, collective in work.items():
            seconds = []
            for _ in range(rounds):
                torch.mm(square, square)
                start = time.perf_counter()
                collective()
                seconds.append(time.perf_counter() - start)
                own.clamp_(-1, 1)  # sums of sums do not overflow
            timings.append(Timing(name, world, numbers, median(seconds)))
    return timings


def step_of(model, x):
    wrapped = DistributedDataParallel(model)  # sends its buffers, too, as it does by default
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    y = torch.randint(10, (len(x),))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def time_steps(rank, world, name, rounds):
    """The median seconds of a step with local norms, with synchronized ones, and with these but without exchanges.

    They are measured in turns. The last are what the layer itself takes in two halves, before and after its exchange.
    """
    torch.manual_seed(0)
    model, x = MEASURED[name]()
    synced = nk.convert(model, to="sync").model
    steps = [step_of(model, x), step_of(synced, x), step_of(keep_apart(nk.convert(model, to="sync").model), x)]
    channels = norm_channels(synced)
    count_collectives(steps[1], channels)
    seconds = [[] for _ in steps]
    for turn in range(rounds + 1):
        for step, found in zip(steps, seconds, strict=True):
            distributed.barrier()
            start = time.perf_counter()
            step()
            if turn:
                found.append(time.perf_counter() - start)
    return *map(median, seconds), channels


def keep_apart(model):
    """Synchronized norms that go the same way, and exchange nothing."""
    for layer in model.modules():
        if isinstance(layer, nk.SyncBatchNorm):
            layer._ranks_sharing, layer._gather, layer._reduce = (lambda: 2), (lambda own: own), (lambda sums: sums)
    return model


def count_collectives(step, channels):
    """Check that a step has one of 2C + 1 numbers forward and one of 2C backward for every layer, and no more."""
    step()
    sizes = {"all_gather": [], "all_reduce": []}
    originals = {name: getattr(distributed, name) for name in sizes}

    def counting(name, which):
        def call(*args, **kwargs):
            sizes[name].append(args[which].numel())
            return originals[name](*args, **kwargs)

        return call

    for name, which in (("all_gather", 1), ("all_reduce", 0)):
        setattr(distributed, name, counting(name, which))
    try:
        step()
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)
    expected = [collectives(count, 2) for count in channels]
    for name, found in sizes.items():
        assert sorted(found) == sorted(n for layer in expected for kind, _, n in layer if kind == name), (name, found)


def time_alternatives(rank, world, name, rounds):
    """The median seconds of a step with batch, group and ghost norms, in turns."""
    torch.manual_seed(0)
    model, x = MEASURED[name]()
    ghost = nk.convert(model, to="ghost", chunk_size=len(x) // 2).model
    steps = [step_of(each, x) for each in (model, nk.convert(model, to="group").model, ghost)]
    seconds = [[] for _ in steps]
    for turn in range(rounds + 1):
        for step, found in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            if turn:
                found.append(time.perf_counter() - start)
    return list(map(median, seconds))


# ---- what is found


def percent(part):
    if part >= 9.95:
        return f"{part:,.0f} times"
    return f"{100 * part:.0f} %" if part >= 0.095 else f"{100 * part:.1f} %"


def micro(seconds):
    return f"{1e6 * seconds:.0f}"


def say(*words):
    print(*words, flush=True)


def measure_collectives(rounds):
    timings = []
    for world in WORLDS:
        say(f"collectives of {world} processes …")
        timings += on_ranks(time_collectives, world, rounds)
    # One link for each number of processes: 4 of them share 2 cores, and wait for these rather than for the network.
    links = {world: fitted(f"{world} processes", [one for one in timings if one.ranks == world]) for world in WORLDS}
    rows = [
        [one.collective, one.ranks, one.numbers, micro(one.seconds), micro(links[one.ranks].seconds(*one[:3]))]
        for one in sorted(timings)
    ]
    columns = ["collective", "processes", "numbers", "measured, us", "fitted, us"]
    return links, {"title": "Collectives on this machine", "columns": columns, "rows": rows}


def measure_steps(links, rounds):
    rows, ratios = [], {world: [] for world in WORLDS}
    for name in MEASURED:
        for world in WORLDS:
            say(f"steps of {name} on {world} processes …")
            without, with_sync, apart, channels = on_ranks(time_steps, world, name, rounds)
            halves, said = apart / without - 1, links[world].sync_seconds(channels, world) / without
            sent = f"{bytes_sent(channels, world) / 1024:.0f} KB"
            times = [f"{1e3 * seconds:.1f}" for seconds in (without, with_sync)]
            measured = with_sync / without - 1
            ratios[world].append(measured / (halves + said))
            rows.append(
                [name, world, len(channels), sent, *times, *map(percent, (measured, halves + said, halves, said))]
            )
    columns = ["network and batch of a process", "processes", "norms", "sent by each", "step without, ms", "with, ms"]
    title = "A training step with SyncBatchNorm over one with BatchNorm, both under DistributedDataParallel"
    columns += ["overhead", "predicted", "of which the layer in two halves, measured", "and exchanges, by the model"]
    return ratios, {"title": title, "columns": columns, "rows": rows}


def measure_alternatives(rounds):
    rows, overheads = [], []
    for name in MEASURED:
        say(f"group and ghost norms in {name} …")
        batch, group, ghost = on_ranks(time_alternatives, 1, name, rounds)
        overheads.append(group / batch - 1)
        rows.append([name, percent(group / batch - 1), percent(ghost / batch - 1)])
    columns = ["network and batch, one process", "GroupNorm", "GhostBatchNorm, two chunks"]
    return max(overheads), {
        "title": "What the alternatives add to a step with BatchNorm",
        "columns": columns,
        "rows": rows,
    }


def overhead(network, link, ranks, examples):
    """The part of a step's compute that synchronized norms add."""
    channels, seconds = network
    return link.sync_seconds(channels, ranks) / seconds[examples]


def assumed_links():
    rows = [
        [one.name, f"{1e6 * one.overhead:g} us", f"{1e6 * one.latency:g} us", f"{one.bandwidth / 1e9:g} GB/s"]
        for one in LINKS
    ]
    return {"title": "Links, as assumed", "columns": ["link", "launch", "latency", "bandwidth"], "rows": rows}


def predictions(networks):
    rows = []
    for name, network in networks.items():
        channels, _ = network
        for link in LINKS:
            found = [percent(overhead(network, link, ranks, PER_RANK)) for ranks in RANKS]
            rows.append([f"{name}: {len(channels)} norms, {sum(channels):,} channels", link.name, *found])
    title = f"Predicted: what exchanges over all ranks add to the compute of a step, {PER_RANK} examples a rank"
    return {"title": title, "columns": ["network", "link", *(f"{ranks} ranks" for ranks in RANKS)], "rows": rows}


def advice(networks, limit):
    """For small batches: over how many ranks to synchronize, what it adds there, and whether a group norm adds less."""
    rows = []
    for name, network in networks.items():
        for examples, ranks in group_sizes(ENOUGH, EXAMPLES):
            found = []
            for link in LINKS:
                part = overhead(network, link, ranks, examples)
                found.append(f"{percent(part)}: {'sync' if part <= limit else 'group'}")
            rows.append([name, examples, ranks, *found])
    title = f"What follows for small batches: synchronize over as many ranks as have {ENOUGH} examples together"
    columns = ["network", "examples a rank", "ranks", *(link.name for link in LINKS)]
    return {"title": title, "columns": columns, "rows": rows}


def reach(networks, limit):
    """Up to how many ranks synchronizing over all of them costs less than a group norm."""
    rows = []
    for name, network in networks.items():
        most = [
            most_ranks(partial(overhead, network, link, examples=PER_RANK), limit, (2, 4, *RANKS)) for link in LINKS
        ]
        rows.append([name, *("none" if one is None else one for one in most)])
    title = f"Up to so many ranks of {PER_RANK} examples, synchronizing over all of them adds {percent(limit)} or less"
    return {"title": title, "columns": ["network", *(link.name for link in LINKS)], "rows": rows}


def notes(limit, group, networks, ratios):
    cases = [
        (overhead(network, link, ranks, examples) <= limit, name, examples)
        for name, network in networks.items()
        for examples, ranks in group_sizes(ENOUGH, EXAMPLES)
        for link in LINKS
    ]
    by_network = ", ".join(
        f"{sum(fits for fits, of, _ in cases if of == name)} of {sum(of == name for _, of, _ in cases)} for {name}"
        for name in networks
    )
    by_world = ", ".join(
        f"{min(of):.1f} to {max(of):.1f} times the predicted with {world} processes" for world, of in ratios.items()
    )
    name, network = next(iter(networks.items()))
    slow = LINKS[-1]
    few, many = (percent(overhead(network, slow, ranks, PER_RANK)) for ranks in (RANKS[0], RANKS[-1]))
    return [
        f"Assumed for compute, three forward passes' worth: {ACCELERATOR.operations / 1e12:g} teraflops per second in "
        f"products, {ACCELERATOR.memory / 1e12:g} TB/s of memory for activations in bfloat16, and "
        f"{1e6 * ACCELERATOR.launch:g} us to launch a pass; for each layer, the longest of the three. {name} then "
        f"trains on {PER_RANK / network[1][PER_RANK]:,.0f} images per second and accelerator in batches of {PER_RANK}, "
        f"and on {EXAMPLES[0] / network[1][EXAMPLES[0]]:,.0f} in batches of {EXAMPLES[0]}.",
        f"The overhead measured is {by_world}. What is left is in neither part, such as exchanges "
        "of gradients that go on at the same time, and the wait for the slowest process at every layer; four of them "
        "share the cores of this machine, which decides what their exchanges take.",
        f"GroupNorm made a step {percent(group)} longer here, at most. Synchronizing is taken to be worth "
        f"{percent(limit)}: {percent(BUDGET)} of a step, or what a group norm adds, if that is more. Of the small "
        f"batches above it is worth it in {by_network}.",
        f"Over all ranks, what is gathered grows with their number: over {slow.name}, the exchanges of {name} go from "
        f"{few} of its compute on {RANKS[0]} ranks to {many} on {RANKS[-1]}.",
    ]


def pictures(networks):
    stacked = []
    for name, network in networks.items():
        if not name.startswith("ResNet-50"):  # one network, on small and on large images
            continue
        ranks = [2**power for power in range(1, 13)]
        curves = [
            Curve(link.name, ranks, [100 * overhead(network, link, count, PER_RANK) for count in ranks])
            for link in LINKS
        ]
        stacked.append(Figure(name, "ranks", "added to a step's compute, %", curves, log_x=True, log_y=True))
    return stacked


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the record to write; its picture goes beside it")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    start = time.monotonic()
    calls, steps = (20, 2) if args.quick else (300, 30)
    networks = predicted_networks()
    links, timed = measure_collectives(calls)
    ratios, stepped = measure_steps(links, steps)
    group, others = measure_alternatives(steps)
    limit = max(BUDGET, group)
    tables = [timed, stepped, others, assumed_links(), predictions(networks), reach(networks, limit)]
    tables.append(advice(networks, limit))
    for table in tables:
        say(f"\n{table['title']}\n" + "\n".join("\t".join(map(str, row)) for row in [table["columns"], *table["rows"]]))
    say(f"\n{time.monotonic() - start:.0f} s")
    if args.out:
        picture = args.out.with_suffix(".png")
        write_stack(pictures(networks), picture)
        machine = describe_environment()
        record = {
            "picture": {"file": picture.name, "title": "What SyncBatchNorm adds to a step, by ranks and links"},
            "tables": tables,
            "notes": notes(limit, group, networks, ratios),
            "run": f"`benchmarks/sync_cost.py` on {machine['cpu']}, torch {machine['torch']}, gloo over the loopback, "
            f"one thread a process; medians of {calls} collectives and {steps} steps.",
            "reported": f"Measured on {datetime.now(UTC):%Y-%m-%d}.",
        }
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
