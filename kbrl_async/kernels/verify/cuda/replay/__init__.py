"""Doing a candidate's recorded work again, in a trusted process that never runs its host code.

::

    bench: `ReplaySession` ── images (machine code), plan ──▶ player: arena at BASE, modules, CUDA graphs
           └── own mapping of the player's arena: inputs, poison, image, outputs ◀── works there ──┘
"""
