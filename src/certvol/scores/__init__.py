"""Turn arrays into numbers: metrics, measures of certainty, validators."""
