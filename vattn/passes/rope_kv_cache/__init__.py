"""Fuses RoPE and the cache update into one op."""
