"""The seam to the Neuron SDK: its installed parts, tracing and compiling, its files."""
