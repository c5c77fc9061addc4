"""Fine-tune one task: elastically, or as a user would without this project.

options ◄ baselines, freezing ─► script ─┬─► elastic ─────────► outputs ─► finished_run ─► series
                                         └─► experiments.rivals ───┘
killed_run: what may go on in its folder     usage: what was asked for wrongly, in a line
"""
