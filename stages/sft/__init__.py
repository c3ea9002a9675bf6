"""sft: fine-tune the base model on demonstrations and measure the effect."""
