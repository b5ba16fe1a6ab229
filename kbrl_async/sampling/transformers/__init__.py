"""An engine over any Hugging Face causal model."""
