"""The part of scikit-learn that the examples need, where it is missing; see gpu_suite.py."""
