"""Runs the graphs of a bundle: with XLA (CPU, or the Neuron PJRT plugin), or their NEFFs with nrtpy."""
