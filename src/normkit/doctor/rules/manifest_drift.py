from __future__ import annotations

from normkit.doctor.rule import declared

manifest_drift = declared(
    "NK502",
    "manifest-drift",
    severity="error",
    seen_by=("load", "export"),
    page="""Eps, momentum or mode differ from those the weights were trained with.

    Why it hurts: a state_dict holds no eps, no momentum and no mode. Weights that were trained with eps 1e-3 and loaded
    into layers with 1e-5 compute something else, most where variances are small, and nothing is raised.

    Evidence and threshold: `nk.load` compares the manifest that `nk.save` wrote with the model, and raises
    `nk.MismatchError` with the code and the layers; `nk.check_export` compares a graph with the model. Any difference
    counts.

    Not a fault when: the change is meant, such as another momentum for fine-tuning: `nk.load(..., strict=False)`.

    Remedy: build the model with the file's settings.
    """,
)
