"""Statistics of numbers and of texts, without a language model."""
