"""Backends of latent attention."""
