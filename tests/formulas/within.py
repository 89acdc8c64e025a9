"""Statistics within an example."""
