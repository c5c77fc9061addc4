"""Re-enact the loops that people write, each as it is and with rows, and compare all numbers."""
