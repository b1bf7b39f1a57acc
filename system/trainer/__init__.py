"""The gradient of a step batch."""
