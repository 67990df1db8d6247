"""Runs a model to choose or judge scales."""
