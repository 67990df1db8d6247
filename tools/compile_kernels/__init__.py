"""Compile every kernel ahead of time for every target, on a machine without a GPU."""
