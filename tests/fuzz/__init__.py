"""Fuzzing: random layers in every form, checked by an oracle that shares no code with cupyconv.

``python -m tests.fuzz`` runs it, ``make fuzz`` for ten minutes.  hypothesis draws layers
(drawing.py) and shrinks failing ones.  They run on NumPy by every method, and on the CPU emulator
of the kernels by every family and chip (checking.py, kernels.py).  The expected results follow from
PyTorch and the published rules (oracle.py, judging.py).  A wrong call is printed as a program
(attack.py).
"""
