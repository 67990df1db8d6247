"""Layers without a cache."""
