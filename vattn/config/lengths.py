"""Bounds of lengths, for the host and for kernels, which are compiled without torch."""

MAX_SEQ_LEN = 1 << 30
"""Longest sequence: sums of lengths and of windows fit int32."""
