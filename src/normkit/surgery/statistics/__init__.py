"""`recalibrate` and `adapt`: a model's stored statistics from batches, and what is watched meanwhile."""
