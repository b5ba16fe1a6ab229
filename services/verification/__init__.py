"""The verifier over HTTP."""
