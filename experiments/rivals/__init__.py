"""Train as a user would without this project.

plain_loop ─► models: what each baseline trains · frozen_part: what freezes, and is kept
           ─► views of augmented samples · judging: outputs and metrics
"""
