"""Probes of modules, gradients and ops in a Trainer's fit, and replay of training steps."""
