"""Latent attention: decode of 16 to 128 heads, sparse decode, prefill."""
