"""Compile farm: untrusted source in, content-addressed artifact out."""
