"""assets: base model and raw data, by hub id, local path, or the embedded default."""
