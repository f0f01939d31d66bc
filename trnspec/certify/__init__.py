"""Certificates of token identity: comparisons of runs, and the page that says what they are of."""
