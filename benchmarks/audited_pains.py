"""Faulty training loops as users wrote them, under torch-audit 0.3.0 and under the doctor: what each says of them.

torch-audit runs as its own quick start has it, `autopatch` around the loop, auditing every step; then it is given the
finished model and the batches that `nk.examine` is given. Whether it names a fault goes by `NAMES`, where every rule
stands that speaks of what is wrong in a row, and it names the layer if such a finding has one of the layers at fault.
Of both tools it is compared whether the loop and the model end as without them: values bit for bit, modes, hooks,
attributes of the model and of the optimizer.

With `--out`, the counts go to a record for the documentation, in which loops of an earlier call stay. Exits with 2 if
torch-audit is not installed.
"""

import argparse
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the loops are shared with the tests
import normkit as nk
from support.pains import PAINS, Seen, is_named, seen, unwatched

INSTALL = (
    "torch-audit cannot be imported. It is compared with, and not needed otherwise: pip install --no-deps --target "
    "FOLDER torch-audit==0.3.0, and FOLDER in PYTHONPATH; it wants click and rich, too."
)
# The rules of torch-audit that speak of what is wrong, by row: read generously.
NAMES = {
    4: {"TA304"},  # tiny batch size
    5: {"TA501"},  # a stateful layer is called several times
    6: {"TA304"},
    9: {"TA100", "TA301", "TA305"},  # NaN or infinity, a range that ends at infinity, invalid input values
    18: {"TA501"},
    22: {"TA100"},
}


def state_of(model, optimizer):
    """What a tool must leave as it was."""
    values = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    attributes = [sorted(vars(each)) for each in (*model.modules(), *([] if optimizer is None else [optimizer]))]
    return values, (modes, hooks, attributes)


def changes(one, other):
    """In what two loops have not ended alike; NaN equals NaN."""
    found = [
        what for what, mine, its in zip(("modes", "hooks", "attributes"), one[1], other[1], strict=True) if mine != its
    ]
    is_equal = one[0].keys() == other[0].keys() and all(
        torch.equal(value.nan_to_num(7.0), other[0][key].nan_to_num(7.0)) for key, value in one[0].items()
    )
    return found if is_equal else ["values", *found]


def all_changes(some, others):
    return sorted({change for pair in zip(some, others, strict=True) for change in changes(*pair)})


def followed(ends, inner):
    """Around a loop: what is around it already, and then the state it has ended in."""

    @contextmanager
    def around(model, optimizer):
        with inner(model, optimizer):
            yield
        ends.append(state_of(model, optimizer))

    return around


def by_audit(pain, torch_audit):
    """What torch-audit says, as (rule, layer, words), and the states in which the loops have ended."""
    found, ends = [], []

    @contextmanager
    def audited(model, optimizer):
        auditor = torch_audit.autopatch(model, optimizer=optimizer, every_n_steps=1)
        try:
            yield
        finally:
            found.extend(auditor.finish().findings)
            auditor.unpatch()

    trained = pain.run(True, followed(ends, audited))
    auditor = torch_audit.Auditor(trained.model, optimizer=trained.optimizer)
    with auditor:
        auditor.audit_static()
        for batch in trained.batches:
            auditor.audit_data(batch[0])
    found.extend(auditor.finish().findings)
    return list(dict.fromkeys(Seen(one.rule_id, one.module_path, one.message) for one in found)), ends


def by_ours(pain):
    """The same by watch and examine, and what examine has changed in the model."""
    ends, ends_of_examine = [], []

    def run(is_faulty, around):
        return pain.run(is_faulty, followed(ends, around))

    def examine(model, batches, loss, optimizer):
        before = state_of(model, optimizer)
        diagnosis = nk.examine(model, batches, loss, optimizer)
        ends_of_examine.append((before, state_of(model, optimizer)))
        return diagnosis

    found = seen(replace(pain, run=run), examine=examine)
    return found, ends, all_changes(*zip(*ends_of_examine, strict=True))


def seeded(function, *args):
    torch.manual_seed(0)
    return function(*args)


def compared(pain, torch_audit):
    """One row: what both say, and what they leave."""
    plain_ends = []
    seeded(pain.run, True, followed(plain_ends, unwatched))
    theirs, their_ends = seeded(by_audit, pain, torch_audit)
    ours, our_ends, changed = seeded(by_ours, pain)
    speaking = [one for one in theirs if one.code in NAMES.get(pain.row, ())]
    return {
        "row": pain.row,
        "fault": pain.name,
        "audit": sorted({f"{one.code} {one.layer or ''}".strip() for one in theirs}),
        "audit_names": bool(speaking),
        "audit_layer": any(one.layer in pain.layers for one in speaking),
        "audit_changes": all_changes(plain_ends, their_ends),
        "ours": sorted({f"{one.code} {one.layer}" for one in ours if one.code == pain.code}),
        "ours_names": is_named(pain, ours),
        "ours_changes": sorted({*changed, *all_changes(plain_ends, our_ends)}),
    }


def show(one):
    def word(is_so):
        return "yes" if is_so else "no"

    def changed(what):
        return f"changed: {', '.join(what) or 'nothing'}"

    print(f"row {one['row']}, {one['fault']}")
    print(f"    torch-audit: {', '.join(one['audit']) or 'nothing'}")
    print(
        f"        fault {word(one['audit_names'])}, layer {word(one['audit_layer'])}; {changed(one['audit_changes'])}"
    )
    print(f"    normkit: {', '.join(one['ours']) or 'nothing'}")
    print(f"        fault, layer and cause {word(one['ours_names'])}; {changed(one['ours_changes'])}", flush=True)


def counts(rows):
    """The table of the documentation: a line for each row of complaints, and the sums."""
    keys = ("audit_names", "audit_layer", "audit_same", "ours_names", "ours_same")
    rows = [one | {f"{who}_same": not one[f"{who}_changes"] for who in ("audit", "ours")} for one in rows]
    lines = []
    for number in sorted({one["row"] for one in rows}):
        mine = [one for one in rows if one["row"] == number]
        faults = "; ".join(dict.fromkeys(one["fault"].rpartition(", ")[0] for one in mine))
        lines.append([faults, len(mine), *(sum(one[key] for one in mine) for key in keys)])
    return [*lines, ["all", len(rows), *(sum(one[key] for one in rows) for key in keys)]]


def keep(path, rows, versions):
    """Put the rows into the record, in the place of older ones of the same loops, and count anew."""
    old = json.loads(path.read_text())["loops"] if path.exists() else []
    loops = {(one["row"], one["fault"]): one for one in [*old, *rows]}
    loops = [loops[key] for key in sorted(loops)]
    titles = ["torch-audit: fault", "its layer", "left as it was", "normkit: fault, layer, cause", "left as it was"]
    tables = [{"title": "", "columns": ["fault", "loops", *titles], "rows": counts(loops)}]
    run = f"`benchmarks/audited_pains.py`, with {versions}; the numbers are of loops."
    path.write_text(json.dumps({"run": run, "tables": tables, "loops": loops}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, help="of complaints; all by default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        import torch_audit
    except ImportError as error:
        print(f"{INSTALL} ({error})", file=sys.stderr)
        sys.exit(2)
    print(f"torch-audit {torch_audit.__version__}, normkit {nk.__version__}, torch {torch.__version__}")
    rows = []
    for pain in PAINS:
        if not args.rows or pain.row in args.rows:
            rows.append(compared(pain, torch_audit))
            show(rows[-1])
    if args.out:
        keep(args.out, rows, f"torch-audit {torch_audit.__version__} and torch {torch.__version__}")
    print(*("\t".join(map(str, line)) for line in counts(rows)), sep="\n")
    sys.exit(not all(one["ours_names"] for one in rows))


if __name__ == "__main__":
    main()
