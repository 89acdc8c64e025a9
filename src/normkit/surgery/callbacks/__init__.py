"""Verbs in training loops: norms that are frozen, recalibrated, synchronized or kept still while a model trains.

Each is an object that a loop of one's own calls; `lightning_callback` and `trainer_callback` let Lightning's Trainer
and that of transformers call it.
"""

from __future__ import annotations

from typing import Any

from normkit.errors import ArgumentError
from normkit.frameworks import LoopCallback, lightning_layer_sync, lightning_loop_callback, trainer_loop_callback
from normkit.surgery.callbacks.freeze_norms import FreezeNorms
from normkit.surgery.callbacks.no_updates import NoUpdates
from normkit.surgery.callbacks.recalibrate_norms import RecalibrateNorms
from normkit.surgery.callbacks.sync_norms import SyncNorms

__all__ = [
    "FreezeNorms",
    "NoUpdates",
    "RecalibrateNorms",
    "SyncNorms",
    "lightning_callback",
    "lightning_plugin",
    "trainer_callback",
]


def lightning_callback(callback: LoopCallback) -> Any:
    """A callback for `lightning.Trainer(callbacks=[...])` that does what this one does in a loop of one's own.

    Args:
        callback: a FreezeNorms, RecalibrateNorms or NoUpdates. For SyncNorms, see `lightning_plugin`.
    """
    if isinstance(_checked(callback, "lightning_callback"), SyncNorms):
        raise ArgumentError(
            "lightning_callback takes no SyncNorms: what must be done before Lightning wraps a model is for a plugin. "
            "Use Trainer(plugins=[lightning_plugin(SyncNorms())])."
        )
    return lightning_loop_callback(callback, "lightning_callback")


def lightning_plugin(callback: SyncNorms) -> Any:
    """A plugin for `lightning.Trainer(plugins=[...])` that synchronizes norms, as `sync_batchnorm=True` does torch's.

    Lightning calls it where several processes train a model, before it wraps the model, and again when they end.
    """
    if not isinstance(callback, SyncNorms):
        raise ArgumentError(f"lightning_plugin needs SyncNorms(); got a {type(callback).__name__}.")
    return lightning_layer_sync(callback, "lightning_plugin")


def trainer_callback(callback: LoopCallback) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])` that does what this one does in a loop of one's own.

    The Trainer tells callbacks nothing of an error: after one, `on_error(model)` of the callback that was given lets go
    of the model.

    Args:
        callback: a FreezeNorms, RecalibrateNorms, SyncNorms or NoUpdates.
    """
    return trainer_loop_callback(_checked(callback, "trainer_callback"), "trainer_callback")


def _checked(callback: LoopCallback, who: str) -> LoopCallback:
    if not isinstance(callback, LoopCallback):
        raise ArgumentError(
            f"{who} needs a FreezeNorms, RecalibrateNorms, SyncNorms or NoUpdates; got a {type(callback).__name__}."
        )
    return callback
