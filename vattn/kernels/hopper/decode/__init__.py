"""Decode over plain and FP8 caches: one schedule, a Triton kernel, a Gluon kernel, clusters of CTAs."""
