"""Model families: the known ones, custom attention code, and rows proposed from a shape."""
