"""Pure functions on plain tensors: no I/O, no configuration, no hidden state."""
