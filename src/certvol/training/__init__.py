"""Training in two phases, and what it keeps."""
