"""How far the timeline is from public measurements of whole kernels on trn2: `python -m nkisim.accuracy`."""
