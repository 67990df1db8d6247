"""`python -m vattn bench`: vattn beside every other library's kernels that this machine has, in one run."""
