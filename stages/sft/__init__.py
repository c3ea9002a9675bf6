"""sft: teach the base model the demonstrations, and measure what changed."""
