"""Fine-tune one task: elastically, or as a user would without this project.

workload: model, data, judge ◄─ glue, questions, images ◄─ smoke: tiny ones of the same formats
options ─► freezing ─► run: elastic ─► outputs
              └──────► plain_loop: the rivals ┘
"""
