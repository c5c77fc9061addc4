"""Describe what is fine-tuned: model, data, judge.

workload ◄─ glue, questions ◄ squad: spans and their scores, images
text_model: models and tokenizers     smoke: tiny models and files of the same formats
"""
