"""`convert`, `freeze` and `unfreeze`: a norm in the place of another, with its state."""
