"""Hold what several files of tests share: tiny models and data, pools of ranks, plain loops."""
