"""Static checks of candidates: nothing of a candidate runs."""
