"""TRL's trainers, set up the same way for each stage that trains."""
