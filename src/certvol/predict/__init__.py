"""A run's model in use."""
