"""Kernels that write the cache: plain and packed formats, with and without RoPE."""
