"""A standing attack: random layers in every form, judged by an oracle that shares no code.

``python -m tests.fuzz`` runs it; ``make fuzz`` for ten minutes.  Layers are drawn from a seed and a
number (drawing.py), run on NumPy by every method, and through the kernels on the CPU emulator by
every family and chip (checking.py, kernels.py), and compared with what PyTorch and the published
rules say (oracle.py, judging.py).  What fails is made smaller (shrinking.py) and printed as a
program (reporting.py).
"""
