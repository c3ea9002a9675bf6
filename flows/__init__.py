"""When and where the stages run: Prefect above, DVC in the middle, MLflow beside."""
