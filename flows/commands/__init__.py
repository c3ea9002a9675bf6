"""What a user starts beside the pipeline, from the terminal or as a Prefect deployment."""
