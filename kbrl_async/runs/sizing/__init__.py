"""What a policy takes of a device's memory, by arithmetic alone: `footprint` counts, `layout` says who shares a GPU and
what to set. No torch, no weights: a `config.json` is enough.
"""
