"""Networks that others wrote, trained in an ordinary loop, have nothing that is worth a warning.

`benchmarks/examined_models.py` does the same with all of them.
"""

import pytest
import torch

import normkit as nk
from support.architectures import ARCHITECTURES
from support.ordinary_training import batches_for, forward_for, loss, trained

CHOSEN = [
    a for a in ARCHITECTURES if a.name in ("UNet", "ResNetForImageClassification", "RegNetModel", "PatchTSTModel")
]


@pytest.mark.deep
@pytest.mark.parametrize("architecture", CHOSEN, ids=lambda architecture: architecture.name)
def test_a_network_that_trains_well_is_healthy(architecture):
    pytest.importorskip(architecture.package)
    torch.manual_seed(1)
    batches = batches_for(architecture)
    model, optimizer = trained(architecture, batches, steps=50)
    for mode in (True, False):
        diagnosis = nk.examine(model.train(mode), batches, loss, optimizer, forward_for(architecture))
        assert diagnosis.ok, [str(one) for one in diagnosis.findings if one.severity != "info"]
