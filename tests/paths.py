"""Where the repository is, for tests at any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
