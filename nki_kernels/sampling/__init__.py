"""The sampling kernels: noise, samples, sums above thresholds, acceptance."""
