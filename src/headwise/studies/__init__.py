"""Studies: arms x seeds with paired statistics."""
