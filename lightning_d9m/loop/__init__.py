"""The recorder for any training loop: plain torch, Fabric, Accelerate."""
