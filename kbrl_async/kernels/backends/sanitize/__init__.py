"""Candidates under sanitizers."""
