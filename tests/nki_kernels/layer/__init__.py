"""The halves of a decoder layer: against their laws, their bits, what they refuse."""
