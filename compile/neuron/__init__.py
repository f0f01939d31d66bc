"""The seam to the Neuron SDK: what is installed, how it traces and compiles, its files."""
