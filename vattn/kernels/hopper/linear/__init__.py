"""Products of a few rows with FP8 or 16-bit weights."""
