"""Use a run's model: predict, measure certainty, reject, evaluate, extract and export."""
