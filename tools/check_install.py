"""Check the normkit that is installed here: its C++ core is in use, and computes what torch computes."""

from __future__ import annotations

import torch

import normkit as nk
from normkit.kernels import select


def main() -> None:
    """Exit with a message where a release must not be like this."""
    status = select.status()
    if status["backend"] != "native":
        raise SystemExit(f"A release needs its C++ core; got {status}. Build it with NORMKIT_REQUIRE_CORE=1.")
    x = torch.randn(8, 16, 7, 7)
    with select.backend("native"):
        ours = nk.BatchNorm2d(16)(x)
    torch.testing.assert_close(ours, torch.nn.BatchNorm2d(16)(x))
    print(f"normkit {nk.__version__} with torch {torch.__version__}: {status}")


if __name__ == "__main__":
    main()
