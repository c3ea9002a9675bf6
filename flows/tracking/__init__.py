"""Records for MLflow, its model registry, and provenance: which run produced which outputs."""
