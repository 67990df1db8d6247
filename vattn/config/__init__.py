"""What is requested: frozen, hashable, written as one string. The only room that validates a request."""
