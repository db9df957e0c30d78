"""Diagnosis of runs: why one did not learn, or learned something else than was meant."""
