"""The name of the package that JAX's plugin for Trainium comes with; nothing is in it."""
