"""Prove on a GPU what was built without one, in a few minutes: one command, one report.

    python -m experiments.gpu_check --pack .gpu            at home: what the other machine needs
    python -m experiments.gpu_check --data .gpu --out gpu  there
    python -m experiments.gpu_check --device cpu --tiny --seconds 170 --out gpu   a rehearsal

running        each phase in a process of its own, with its own limit
findings       what a phase has found so far; lost neither by a hang nor by a crash
table          the report for people
pack           pretrained weights, images and sentences in one folder
workloads      models and samples
loops          the rival, the ideal (frozen activations in one tensor on the device), ours
part_loops     the same where a module is frozen, of part_cases
short_runs     runs that are held against each other
phases/        what is proven and measured
"""
