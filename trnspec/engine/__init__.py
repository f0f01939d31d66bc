"""Serving a bundle: slots and steps, when to speculate, compiled graphs, text."""
