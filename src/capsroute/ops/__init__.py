"""The mathematics of capsule routing, as pure functions on tensors."""
