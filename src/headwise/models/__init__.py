"""Models: where heads live in each family, loading, slices of weights and patches."""
