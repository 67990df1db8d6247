"""The general attention kernel over paged and varlen keys, its split reduction, and encoders."""
