"""Experiment trackers behind the sink protocol: Weights & Biases, MLflow, Trackio."""
