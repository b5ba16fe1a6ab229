"""Candidates under the rules `open`: what they build shows when they run, in a confined child.

::

    import, ModelNew(*init), forward ─ every loader and launcher replaced ─▶ extensions, C and CUDA sources, Triton
         └─▶ each built by the backend that it belongs to ─▶ one report
"""
