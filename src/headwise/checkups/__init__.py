"""The first command for any model: what its heads do, which are ill, and what can be gained."""
