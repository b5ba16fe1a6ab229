"""A decoder with its backward pass by hand, for speed."""
