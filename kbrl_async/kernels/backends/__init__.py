"""Languages that candidates are written in: one folder a language, and what they share."""
