"""Run many methods on the tasks of a benchmark, and make tables of what the runs wrote."""
