"""`torch.compile`, CUDA graphs, export and warm-up."""
