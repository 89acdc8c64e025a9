"""What stands behind `recalibrate` and `adapt`: statistics over batches, and what is watched meanwhile."""
