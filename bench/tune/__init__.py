"""`python -m bench.tune`: draft, k, tp, draft tp and batch chosen before anything is compiled, from simulated times."""
