"""serving: a round's reward model over HTTP."""
