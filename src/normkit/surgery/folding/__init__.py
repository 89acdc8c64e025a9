"""What stands behind `fold`: watching a model run, finding what can be folded, and proving it."""
