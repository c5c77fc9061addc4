"""State and simulate the published experiment: setting ─► runs ─► ablation; convergence: its figure 2."""
