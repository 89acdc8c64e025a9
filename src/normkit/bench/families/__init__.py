"""What `normkit bench` measures, by family: each is a function that gives its cases."""
