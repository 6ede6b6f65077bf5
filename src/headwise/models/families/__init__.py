"""Model families: the table of rows, custom attention code, and rows proposed from a shape."""

from headwise.models.families.rows import ARCHITECTURES, NOT_SEPARABLE

__all__ = ["ARCHITECTURES", "NOT_SEPARABLE"]
