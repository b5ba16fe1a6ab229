"""Timing bench: correctness first, then timing, one candidate at a time on a core of its own."""
