"""Commands beside the pipeline, started from the terminal or as a Prefect deployment."""
