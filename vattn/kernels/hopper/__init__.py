"""Kernels that need sm_90, in Triton or Gluon."""
