"""gate: thresholds, verdicts and approvals of the quality gates, and the champion that follows from
them.
"""
