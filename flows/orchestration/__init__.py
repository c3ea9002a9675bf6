"""Prefect: server, approvals, artifacts, concurrency, retries, notifications, crashed runs."""
