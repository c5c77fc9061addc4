"""Time fairly, and hold what is compared.

rounds: actions in turn, ratios, intervals    timed_loop: the rival, and its tasks
loop_process: that loop as its user runs it    both_sides: ours beside it
processes: what ranks of a benchmark found     jpegs: one more task
bars: how a benchmark ends                 narrow_models: where computing is negligible
loop_by_hand: frozen blocks' outputs in one tensor
"""
