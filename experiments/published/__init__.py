"""State and simulate the published experiment: setting ─► runs ─► ablation."""
