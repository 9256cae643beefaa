"""What the examples need of scikit-learn, for a machine that lacks it; see gpu_suite.py."""
