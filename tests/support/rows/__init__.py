"""The rows of the table, by what their statistics are taken over."""
