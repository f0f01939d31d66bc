"""How far the timeline is from public measurements of kernels on trn2: `python -m validation`, in a checkout."""
