"""Config -> parts -> Trainer."""
