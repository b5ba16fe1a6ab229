"""A run: its configuration, its folder, its archive, what it says of itself."""
