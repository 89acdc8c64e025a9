"""What stands behind `convert` and `freeze`: building a norm for the place of another, with its state."""
