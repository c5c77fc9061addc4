"""Time fairly, and hold what is compared.

rounds: actions in turn, ratios, intervals    plain_loop: the rival, and its tasks
loop_process: that loop as its user runs it    jpegs: one more task
processes: what ranks of a benchmark found     bars: how a benchmark ends
"""
