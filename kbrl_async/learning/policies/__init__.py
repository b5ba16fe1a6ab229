"""Policies as files: loaded, published, exported."""
