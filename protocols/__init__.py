"""Nouns and wire: the structs that every floor shares, framing, sockets, and the broker's ledger.

Owns the domain types (`records`), the broker protocol (`messages`, `framing`, `sockets`) and the pure state
machines that decide delivery (`ledger`, `session`). Imports nothing of ours and never torch, so a CPU-only
compile host can install it alone.
"""
