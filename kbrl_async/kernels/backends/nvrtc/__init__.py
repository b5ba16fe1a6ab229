"""Backend `cuda-nvrtc`: device code alone."""
