"""What `import normkit` adds to `import torch`, measured in fresh interpreters, one after the other in turns."""

import os
import statistics
import subprocess
import sys

ROUNDS = 15
CODE = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import normkit
print(between - start, time.perf_counter() - between)
"""


def main():
    # As for any installed package, bytecode is compiled once and then kept.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(ROUNDS + 1):
        out = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=environment
        ).stdout
        runs.append([float(t) for t in out.split()])
    torch_s, normkit_s = zip(*runs[1:], strict=True)  # the first run fills the file cache
    shares = sorted(n / t for t, n in zip(torch_s, normkit_s, strict=True))
    low, mid, high = statistics.quantiles(shares, n=4)
    print(f"import torch    {statistics.median(torch_s) * 1e3:8.1f} ms (median of {ROUNDS})")
    print(f"import normkit  {statistics.median(normkit_s) * 1e3:8.1f} ms on top")
    print(f"added           {mid:8.2%} (quartiles {low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
