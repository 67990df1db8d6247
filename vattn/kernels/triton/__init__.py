"""Triton kernels for any GPU. Nothing here imports Hopper's kernels."""
