"""Configuration, gate verdicts, tables, git, and addresses of the services; no stage is run here."""
