"""Run browser: a local page over the folders of runs, with curves, rollouts and the loss of each token."""
