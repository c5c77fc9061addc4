"""Time fairly, and hold what is compared.

rounds: actions in turn, ratios, intervals    plain_loop: the rival, and its tasks
processes: what ranks of a benchmark found    jpegs: one more task
"""
