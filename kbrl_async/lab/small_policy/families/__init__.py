"""Families of problems: each knows its PyTorch module and how an author would answer it in C.

To add one: one file with a `Family` subclass, one line in `kbrl_async.lab.small_policy.specs`.
"""
