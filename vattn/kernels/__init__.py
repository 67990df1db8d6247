"""Device code and its launches: `triton` runs on any GPU, `hopper` needs sm_90."""
