"""Say what each part of the system gives: train without it, or simulate a described cluster.

parts ◄─ trained: by a script, in processes of their own
      ◄─ simulated: as our planner predicts
"""
