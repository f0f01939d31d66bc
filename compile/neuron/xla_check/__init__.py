"""The module of model.pt through the real torch_xla: what ModelBuilder would hand to the compiler, on any machine."""
