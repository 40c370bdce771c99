"""Read and write the files of a run: folder, checkpoints, tables, warnings."""
