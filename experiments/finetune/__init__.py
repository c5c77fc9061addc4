"""Fine-tune one task: elastically, or as a user would without this project.

options ─► freezing ─► script: elastic ─────────► outputs ─► finished_run ─► series of them
              └──────────────► plain_loop: the rivals ┘
                               └ frozen_part
"""
