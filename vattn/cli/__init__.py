"""The commands: they parse, print and plot. Nothing imports them."""
