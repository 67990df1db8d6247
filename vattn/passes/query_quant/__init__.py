"""Fuses the quantisation of a query into its producer or into the kernel's load."""
