"""Candidates under the rules `open`: what they build is asked of themselves, in a confined child, in place of their text.

::

    import, ModelNew(*init), forward ─ every loader and launcher replaced ─▶ extensions, C and CUDA sources, Triton
         └─▶ each built by the backend that it belongs to ─▶ one report
"""
