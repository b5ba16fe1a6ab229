"""Where problems come from, one module a source."""
