"""The latent attention layer, its cache, its projections and its sparse indexer."""
