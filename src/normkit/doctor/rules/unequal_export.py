from __future__ import annotations

from normkit.doctor.rule import declared

unequal_export = declared(
    "NK504",
    "unequal-export",
    severity="error",
    seen_by=("export",),
    page="""An exported graph computes something else than the model.

    Why it hurts: what is deployed is not what was tested.

    Evidence and threshold: `nk.check_export` runs both on an example, in evaluation; outputs differ by more than 1e-4
    of the largest in float32, 1e-10 in float64, 1e-2 in float16, 5e-2 in bfloat16.

    Not a fault when: the exporter quantizes; then compare with `rtol=` of what quantization may cost.

    Remedy: export the model as it is now, in evaluation, with the same weights.
    """,
)
