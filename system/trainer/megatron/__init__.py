"""The trainer on Megatron-Core: the same step, shared by tensor, pipeline, context, expert and data ranks."""
