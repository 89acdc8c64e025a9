"""What stands behind `save` and `load`: the file, and how a model may differ from it."""
