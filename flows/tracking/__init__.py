"""Records for MLflow, its registry, and provenance: which run made what."""
