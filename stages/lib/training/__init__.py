"""Setup of TRL's trainers for the stages that train with them."""
