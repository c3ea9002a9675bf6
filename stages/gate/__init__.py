"""gate: thresholds, verdicts and approvals of the quality gates, and the champion they decide on."""
