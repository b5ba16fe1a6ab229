"""Backends `cpp` and `cuda`: extensions by `torch.utils.cpp_extension`."""
