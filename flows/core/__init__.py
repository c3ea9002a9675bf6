"""Configuration, gate verdicts, tables, git, and addresses of services; no stage runs here."""
