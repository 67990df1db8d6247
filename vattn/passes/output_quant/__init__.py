"""Fuses the quantisation of an attention output into the kernel."""
