"""`python -m vattn bench`: vattn compared with the kernels of every other library on this machine, in one run."""
