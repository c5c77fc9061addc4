"""The claims about the whole, on real processes, every parameter compared; every bug found."""
