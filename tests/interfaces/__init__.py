"""Tests of the interfaces of TensorFlow, ONNX, CuPy and Dask."""
