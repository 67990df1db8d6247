"""Latent attention on any GPU: absorbed decode, prefill, projections, the sparse indexer."""
