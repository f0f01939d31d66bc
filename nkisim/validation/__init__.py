"""How far the timeline is from public measurements of kernels on trn2: `python -m nkisim.validation`, in a checkout."""
