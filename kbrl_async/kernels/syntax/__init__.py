"""What a reference module computes, read from its source without running it.

Owns the parsing (`scope`), the normal form that hides names and constants (`normal`), the chain of operations
(`operations`) and the terms that the offline embedder counts (`reading`). Code is data here: nothing of it is run.
"""

from kbrl_async.kernels.syntax.reading import ReferenceFacts, Unreadable, read

__all__ = ["ReferenceFacts", "Unreadable", "read"]
