"""Memory of a launch: storage, the tensors that view it, and where they are placed."""
