"""Time fairly, and hold what is compared.

rounds: actions in turn, ratios, intervals    timed_loop: the rival, and its tasks
loop_process: that loop as its user runs it   both_sides: ours beside it
processes: what ranks of a benchmark found    bars: how a benchmark ends
"""
