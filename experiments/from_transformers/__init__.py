"""Train by scripts as people have them for transformers: one option says whose Trainer runs.

glue                  classify sentences and pairs of them
question_answering    find answers in texts
script                what both have in common
"""
