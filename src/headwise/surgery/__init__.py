"""Surgery: which heads, how, and training nothing but their slices."""
