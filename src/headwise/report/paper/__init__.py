"""The BLOOM paper's tables and figures, beside this study's."""
