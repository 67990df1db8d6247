"""What layers with a paged cache share: arguments, binding, scales, the step, the forward pass."""
