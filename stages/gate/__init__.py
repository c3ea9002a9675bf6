"""gate: thresholds, verdicts and approvals of the quality gates, and the resulting champion."""
