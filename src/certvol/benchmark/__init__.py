"""Grids of runs over the tasks of a benchmark, and their tables. It starts runs and reads what they wrote; it never trains."""
