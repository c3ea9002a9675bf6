"""assets: the base model and the raw data, by hub id, local path, or the embedded default."""
