"""One step of a batch: read from the host, checked once, staged, planned, and handed to the layers."""
