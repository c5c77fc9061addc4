"""State and simulate the published experiment: setting ─► runs ─► ablation.

convergence draws its figure of layers that converge, of a run of ours.
"""
