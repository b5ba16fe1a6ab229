"""An engine over any OpenAI-compatible endpoint."""
