"""Answers in CUDA, for backend=cuda-nvrtc: the same problems as in C, with a GPU's own ways to be wrong and slow."""
