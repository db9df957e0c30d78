"""Results of runs in Python: their metrics, samples, curves and model."""
