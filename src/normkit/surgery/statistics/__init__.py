"""`recalibrate` and `adapt`: stored statistics estimated from batches."""
