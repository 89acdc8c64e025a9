"""`convert`, `freeze` and `unfreeze`: a norm replaced by another, which takes over its state."""
