"""Statistics of numbers and of texts; no model."""
