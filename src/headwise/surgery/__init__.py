"""Surgery carries a plan out: what becomes of the slices, how they are trained, what is saved."""
