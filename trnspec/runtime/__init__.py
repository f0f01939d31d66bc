"""Executes the graphs of a bundle: on XLA (CPU, Neuron plugin) or as NEFFs by nrtpy."""
