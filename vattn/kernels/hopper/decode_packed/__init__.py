"""Decode over packed cache formats."""
