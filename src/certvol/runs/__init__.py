"""The files of a run: folder, checkpoint, tables, warnings."""
