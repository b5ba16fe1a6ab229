"""An engine over vLLM."""
