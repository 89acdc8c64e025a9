"""What stands behind `check_export`: reading and running what was exported."""
