"""Attention in plain torch: `scaled_dot_product_attention`, and chunks for what it cannot do."""
