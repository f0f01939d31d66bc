"""The module of model.pt through the real torch_xla, as ModelBuilder would hand it to the compiler, on any machine."""
